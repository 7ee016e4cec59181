"""What prefixes lose that end inside a block: the case for and against sharing partial blocks.

    python -m bench.partial_blocks [--traces TRACE.jsonl ...]

An endless cache, prompts one after the other: how many prompt tokens it has at hand by whole
blocks of each size, and token by token, which is all that copying partial blocks could add. In a
chat, user and assistant speak sentences of the demo model's, by its tokenizer and chat template.

A trace names its blocks of 512 tokens only. Where in the next block two prompts part is not in
it; what is said here holds if all places are alike: (block size - 1) / 2 tokens of each hit.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench.trace_engine import read_requests

from quire import demo_model
from quire.worker.bench.report import format_table
from quire.worker.bench.workload import infinite_cache_hits, synthetic_workload
from quire.worker.hashing import TokenIds, as_token_ids
from quire.worker.text import Tokenizer
from quire.worker.trace_replay import TRACE_BLOCK_SIZE

BLOCK_SIZES = (4, 8, 16, 32, 64)
HEADER = (
    *("workload", "block", "prompt tokens", "hits", "lost a request", "of prompts", "of computed"),
)
Requests = list[tuple[TokenIds, TokenIds]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, nargs="*", default=[], metavar="TRACE.jsonl")
    args = parser.parse_args()

    workloads: dict[str, Requests] = {
        "768 shared + 48": _shared(768, 48),
        "775 shared + 48": _shared(775, 48),
        "8 x 250 + 30": _shared(250, 30, num_prefixes=8),
        "chat, 5 turns": list(_chats(num_conversations=40, num_turns=5)),
        "one question each": list(_chats(num_conversations=190, num_turns=1)),
    }
    rows: list[list[str]] = []
    for name, requests in workloads.items():
        num_prompt = sum(len(prompt) for prompt, _ in requests)
        by_token = sum(infinite_cache_hits(requests, block_size=1))
        for block_size in BLOCK_SIZES:
            hits = sum(infinite_cache_hits(requests, block_size=block_size))
            rows.append(_row(name, block_size, num_prompt, hits, by_token - hits, len(requests)))
    for path in args.traces:
        rows += _trace_rows(path)
    print(format_table(HEADER, rows))


def _row(
    name: str, block_size: int, num_prompt: int, hits: int, lost: float, num_requests: int
) -> list[str]:
    return [
        *(name, str(block_size), f"{num_prompt:,}", f"{hits / num_prompt:.1%}"),
        *(f"{lost / num_requests:.1f}", f"{lost / num_prompt:.2%}"),
        f"{lost / (num_prompt - hits):.2%}",
    ]


def _trace_rows(path: Path) -> list[list[str]]:
    requests = read_requests(path)
    seen: set[int] = set()
    num_prompt = hits = num_hits = 0
    for request in requests:
        names = request.block_names[: (request.num_tokens - 1) // TRACE_BLOCK_SIZE]
        num_found = next((i for i, name in enumerate(names) if name not in seen), len(names))
        seen.update(names)
        num_prompt += request.num_tokens
        hits += num_found * TRACE_BLOCK_SIZE
        num_hits += num_found > 0
    name = path.stem.removesuffix("_trace")
    return [
        _row(name, size, num_prompt, hits, num_hits * (size - 1) / 2, len(requests))
        for size in BLOCK_SIZES
    ]


def _shared(prefix_len: int, own_len: int, *, num_prefixes: int = 1) -> Requests:
    workload = synthetic_workload(
        num_prefixes=num_prefixes,
        prefix_len=prefix_len,
        own_len=own_len,
        output_len=64,
        num_requests=128,
        vocab_size=32_000,
        seed=0,
    )
    rng = np.random.default_rng(1)
    return [
        (item.token_ids, rng.integers(32_000, size=64, dtype=np.uint32)) for item in workload.items
    ]


def _chats(*, num_conversations: int, num_turns: int) -> Iterator[tuple[TokenIds, TokenIds]]:
    """Conversations that go on side by side, a turn of each in every round."""
    rng = random.Random(0)
    tokenizer = Tokenizer.load(demo_model.PATH)
    system = {"role": "system", "content": demo_model.SYSTEM_PROMPT}
    chats = [[system] for _ in range(num_conversations)]
    for turn in range(num_turns):
        for number, chat in enumerate(chats):
            question = demo_model.QUESTIONS[(number + 37 * turn) % len(demo_model.QUESTIONS)]
            chat.append({"role": "user", "content": question})
            prompt = tokenizer.apply_chat_template(chat)
            answer = " ".join(rng.sample(demo_model.QUESTIONS, rng.randint(1, 6)))
            chat.append({"role": "assistant", "content": answer})
            yield as_token_ids(prompt), as_token_ids([*tokenizer.encode(answer), 0])


if __name__ == "__main__":
    main()
