"""What int8 weights and an int8 KV cache cost in accuracy, and what they bring in speed.

    python -m bench.int8 [--only accuracy|speed] [--models S,M] [--rounds N] [--threads N]

Accuracy: every position of some texts is computed as a decode, in bfloat16 and with each option,
and compared with float32: the loss, the mean Kullback-Leibler divergence from float32's
probabilities, and how often the most probable token is the same. The demo model has learned its
answers; prose it has not. Models of random weights have nothing to lose but their logits.

Speed: a decode batch (prompts of 16 tokens, 64 new ones, greedy) through engines that take turns,
as token ids; medians of the rounds, once with the prompts' step and once without. It needs the
machine to itself.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, Shape, make_checkpoint
from tools.demo_model.chats import hand_written
from torch import Tensor

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.config import EngineConfig
from quire.worker.engine import Engine
from quire.worker.hashing import as_token_ids
from quire.worker.model_runner import ModelRunner
from quire.worker.request import Request
from quire.worker.step import SamplingBatch, StepInput
from quire.worker.tensor_parallel import TensorParallel
from quire.worker.text import Tokenizer

# T positions of a text   V vocabulary

VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 weights": {"quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "both": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
CACHE = Path.home() / ".cache" / "quire" / "peers" / "checkpoints"
BLOCK, TEXT_LEN = 16, 256
NUM_CHATS, NUM_TEXTS = 48, 4
PROMPT_LEN, NEW_TOKENS = 16, 64


@dataclass(frozen=True, kw_only=True)
class Text:
    """Token ids, of which those from ``scored`` on count."""

    ids: list[int]
    scored: int = 1


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    shapes = [SHAPES[name] for name in options.models.split(",") if name]
    checkpoints = {shape.name: make_checkpoint(shape, CACHE) for shape in shapes}
    if options.only != "speed":
        _print_accuracy("demo, its answers", demo_model.PATH, _chats())
        _print_accuracy("demo, prose", demo_model.PATH, _prose())
        for shape in shapes:
            _print_accuracy(f"random {shape.name}", checkpoints[shape.name], _noise())
    if options.only != "accuracy":
        for shape in shapes:
            _print_speed(shape, checkpoints[shape.name], options)


def _print_accuracy(what: str, model: Path, texts: Sequence[Text]) -> None:
    print(f"{what}: {len(texts)} texts, {sum(len(t.ids) - t.scored for t in texts)} tokens")
    print(f"  {'':14} {'loss':>8} {'perplexity':>11} {'KL':>9} {'same token':>11}")
    exact = [logits.log_softmax(-1) for logits in _logits(model, texts, dtype="float32")]
    _print_row("float32", texts, exact, exact)
    for name, settings in VARIANTS.items():
        logits = _logits(model, texts, dtype="bfloat16", **settings)
        _print_row(name, texts, exact, [x.log_softmax(-1) for x in logits])


def _print_row(
    name: str, texts: Sequence[Text], exact: Sequence[Tensor], actual: Sequence[Tensor]
) -> None:
    losses, divergences, same = [], [], []
    for text, exact_TV, actual_TV in zip(texts, exact, actual, strict=True):
        where = slice(text.scored - 1, -1)  # a position's logits are of the next token
        exact_TV, actual_TV = exact_TV[where], actual_TV[where]
        wanted_T = torch.tensor(text.ids[text.scored :])
        losses.append(-actual_TV.gather(1, wanted_T[:, None])[:, 0])
        divergences.append((exact_TV.exp() * (exact_TV - actual_TV)).sum(-1))
        same.append((exact_TV.argmax(-1) == actual_TV.argmax(-1)).float())
    loss, divergence, share = (float(torch.cat(x).mean()) for x in (losses, divergences, same))
    print(
        f"  {name:14} {loss:8.4f} {np.exp(loss):11.3f} {divergence:9.2e} {share:11.2%}", flush=True
    )


def _logits(model: Path, texts: Sequence[Text], **settings: Any) -> list[Tensor]:
    """Float32 logits ``[T, V]`` of every position."""
    num_blocks = -(-max(len(text.ids) for text in texts) // BLOCK)
    config = EngineConfig(
        model=model,
        device="cpu",
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_model_len=num_blocks * BLOCK,
        **settings,
    )
    runner = ModelRunner(config, device=torch.device("cpu"), tp=TensorParallel())
    runner.allocate(num_blocks)
    logits = [runner.forward(_step(text.ids)) for text in texts]
    return [x for x in logits if x is not None]


def _step(ids: Sequence[int]) -> StepInput:
    """Each position as a row of its own that decodes its one token, over the blocks of all."""
    size = len(ids)
    positions = np.arange(size, dtype=np.int64)
    table = np.arange(-(-size // BLOCK), dtype=np.int32)
    zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    return StepInput(
        token_ids_T=np.array(ids, np.int64),
        positions_T=positions,
        slot_mapping_T=positions,
        block_tables_BM=np.tile(table, (size, 1)),
        seq_lens_B=(positions + 1).astype(np.int32),
        query_starts_B1=np.arange(size + 1, dtype=np.int32),
        num_decodes=size,
        sample_rows_S=positions.astype(np.int32),
        sampling=SamplingBatch(
            temperature_S=zeros,
            top_p_S=ones,
            top_k_S=zeros.astype(np.int32),
            min_p_S=zeros,
            seed_S=positions,
            position_S=positions,
            num_logprobs_S=zeros.astype(np.int32) - 1,
        ),
    )


def _chats() -> list[Text]:
    """Questions that the demo model was trained on, with their answers, which count."""
    tokenizer = Tokenizer.load(demo_model.PATH)
    texts = []
    for question in hand_written()[::4][:NUM_CHATS]:
        chat = [
            {"role": "system", "content": demo_model.SYSTEM_PROMPT},
            {"role": "user", "content": question.phrasings[0]},
        ]
        prompt = tokenizer.apply_chat_template(chat)
        chat.append({"role": "assistant", "content": question.answer})
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=False)
        texts.append(Text(ids=ids, scored=len(prompt)))
    return texts


def _prose() -> list[Text]:
    """Of this repository's documentation."""
    text = Path(__file__).parents[1].joinpath("docs", "design.md").read_text(encoding="utf-8")
    ids = list(Tokenizer.load(demo_model.PATH).encode(text))
    return [Text(ids=ids[i * TEXT_LEN : (i + 1) * TEXT_LEN]) for i in range(NUM_TEXTS)]


def _noise() -> list[Text]:
    rng = random.Random(0)
    return [
        Text(ids=[rng.randrange(3, VOCAB_SIZE) for _ in range(TEXT_LEN)]) for _ in range(NUM_TEXTS)
    ]


def _print_speed(shape: Shape, model: Path, options: argparse.Namespace) -> None:
    num_requests = shape.num_requests
    print(f"{shape.name}: {num_requests} requests, {PROMPT_LEN} + {NEW_TOKENS} tokens each")
    whole: dict[str, list[float]] = {name: [] for name in VARIANTS}
    decodes: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(
                    model,
                    dtype="bfloat16",
                    device="cpu",
                    num_threads=options.threads,
                    kv_cache_memory_bytes=512 << 20,
                    **settings,
                )
            )
            for name, settings in VARIANTS.items()
        }
        for round_ in range(options.rounds + 1):
            rng = random.Random(round_)
            prompts = [
                [rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_LEN)]
                for _ in range(num_requests)
            ]
            for name, engine in engines.items():
                all_s, decode_s = _run(engine.engine, prompts)
                if round_:  # the first one warms up
                    whole[name].append(all_s)
                    decodes[name].append(decode_s)
    for what, seconds, num_tokens in (
        ("all steps", whole, NEW_TOKENS),
        ("decode steps", decodes, NEW_TOKENS - 1),
    ):
        base = statistics.median(seconds["bfloat16"])
        for name, times in seconds.items():
            median = statistics.median(times)
            rate = num_requests * num_tokens / median
            ratio = base / median
            print(f"  {what:13} {name:13} {rate:8.0f} tokens/s {ratio:5.2f} x bfloat16", flush=True)


def _run(engine: Engine, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """Seconds of all steps, and of those after the first, which computes the prompts."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
    for number, ids in enumerate(prompts):
        engine.add_request(
            Request(request_id=str(number), prompt_token_ids=as_token_ids(ids), params=params)
        )
    start = time.perf_counter()
    while not engine.step():  # the first step's tokens may come with the second
        pass
    first = time.perf_counter()
    while engine.has_work:
        engine.step()
    end = time.perf_counter()
    return end - start, end - first


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.int8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("accuracy", "speed"))
    parser.add_argument("--models", default="S,M", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
