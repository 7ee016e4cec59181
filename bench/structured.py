"""The cost of structured output: compiling, masks and throughput, on random weights.

    python -m bench.structured [--shape S|M] [--requests 1 32] [--schemas N] [--rounds N]

Throughput is that of the same number of tokens with no constraint and with one on every request, in
turns: the best and the median of all rounds are shown. Schemas are those of `bench.schemas`.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoint
from bench.report import command
from bench.schemas import draw_object

from quire.llm import LLM, SamplingParams
from quire.worker.request.structured import Constraint, json_constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer

NUM_TOKENS = 96
PROMPT_TOKENS = 32
EOS = 2
RECORDS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99_999},
            "name": {"type": "string", "maxLength": 30},
            "kind": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    },
}
"""No output of the measured length ends early."""


def main() -> None:
    parser = command("bench.structured", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    checkpoint = make_checkpoint(SHAPES[arguments.shape], arguments.folder)
    grammars(checkpoint, arguments.schemas)
    throughput(checkpoint, arguments.requests, arguments.rounds)


def grammars(checkpoint: Path, number: int) -> None:
    """Times of compiling, of masks along random outputs, and of replaying these."""
    rng = random.Random(0)
    began_s = time.perf_counter()
    made = Grammars(lambda: Tokenizer.load(checkpoint), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    made.compile(Constraint("regex", "a"))
    print(f"tokenizer of {VOCAB_SIZE} tokens: {time.perf_counter() - began_s:.2f} s\n")
    taken: dict[str, list[float]] = {"compile": [], "mask": [], "replay, a token": []}
    for index in range(number):
        schema = json_constraint(draw_object(rng, depth=3)[0] | {"title": str(index)})
        seconds, grammar = _timed(partial(made.compile, schema))
        taken["compile"].append(seconds)
        matcher, output = grammar.matcher(), list[int]()
        while len(output) < 60:
            allowed = np.flatnonzero(
                np.unpackbits(matcher.mask_W.view(np.uint8), bitorder="little")
            )
            output.append(int(rng.choice(allowed)))
            if output[-1] == EOS:
                break
            matcher.consume(output[-1:])
            taken["mask"].append(_timed(matcher.fill)[0])
            assert matcher.error is None
        tokens = output[:-1] if output[-1] == EOS else output
        if tokens:
            seconds, again = _timed(partial(grammar.matcher, tokens))
            taken["replay, a token"].append(seconds / len(tokens))
            assert (again.mask_W == matcher.mask_W).all()
    print(f"| µs, {number} schemas | p50 | p90 | p99 | most |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, each in taken.items():
        figures = [*np.percentile(each, [50, 90, 99]), max(each)]
        print(f"| {name} | " + " | ".join(f"{1e6 * figure:,.0f}" for figure in figures) + " |")


def throughput(checkpoint: Path, requests: Sequence[int], rounds: int) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0)
    modes = {
        "none": [params],
        "all": [SamplingParams(max_tokens=NUM_TOKENS, structured_outputs=json_constraint(RECORDS))],
    }
    print(
        "\n| requests | constrained | tokens/s, best | median | of none, best | of none, median |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    with LLM(checkpoint, num_blocks=1024, enable_prefix_caching=False) as llm:
        rng = np.random.default_rng(0)
        for count in requests:
            prompts: list[Any] = [
                {"prompt_token_ids": rng.integers(3, VOCAB_SIZE, PROMPT_TOKENS).tolist()}
                for _ in range(count)
            ]
            rates: dict[str, list[float]] = {name: [] for name in modes}
            for _ in range(rounds + 1):
                for name, each in modes.items():
                    began_s = time.perf_counter()
                    outputs = llm.generate(prompts, each * count, use_tqdm=False)
                    seconds = time.perf_counter() - began_s
                    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                    assert num_tokens == count * NUM_TOKENS
                    rates[name].append(num_tokens / seconds)
            shown = {name: each[1:] for name, each in rates.items()}  # The first one warms up.
            for name, found in shown.items():
                best, median = max(found), statistics.median(found)
                print(
                    f"| {count} | {name} | {best:.0f} | {median:.0f} "
                    f"| {best / max(shown['none']):.3f} "
                    f"| {median / statistics.median(shown['none']):.3f} |",
                    flush=True,
                )


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = work()
    return time.perf_counter() - began_s, result


if __name__ == "__main__":
    main()
