"""Eviction policies in the engine itself, beside what the simulation says of them.

    python -m bench.eviction_engine TRACE.jsonl [--requests 4000] [--blocks 1000 2000 4000]

Serves the first requests of a trace with the real scheduler, block pool and hashing, and a model
that takes no time. A block of the trace (512 tokens) is one of 16 tokens here; answers shrink
alike. Per cent of prompt tokens found in the cache:

    replay          `bench.eviction`'s simulation: one request after the other, without answers
    engine          the same requests, one at a time, an answer of one token
    engine, N at a time     so many at once, with their answers, whose blocks are cached too

The optimum knows the prompts to come; of requests side by side it takes those submitted for past.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.trace_engine import FACTS, TraceRequest, as_request, make_engine, read_requests, serve
from bench.trace_engine import token_ids as unscaled_token_ids

from quire.worker.bench.report import format_table
from quire.worker.eviction import LowestUtility, PolicyFactory
from quire.worker.eviction_baselines import FurthestNextUse, S3Fifo, by_score, lru
from quire.worker.hashing import TokenIds, hash_blocks, root_hash
from quire.worker.request import Request
from quire.worker.trace_replay import TRACE_BLOCK_SIZE, Prompt, replay

BLOCK_SIZE = 16
SCALE = TRACE_BLOCK_SIZE // BLOCK_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=4000, help="the first so many")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    args = parser.parse_args()

    requests = read_requests(args.trace, limit=args.requests)
    slice_ = Slice(requests)
    header = ("blocks", "policy", "replay", "engine", f"engine, {args.concurrency} at a time")
    rows = []
    for num_blocks in args.blocks:
        for name in ("LRU", "S3-FIFO", "ours", "optimum"):
            rates = (
                slice_.replayed(name, num_blocks),
                slice_.served(name, num_blocks, concurrency=1, answers=False),
                slice_.served(name, num_blocks, concurrency=args.concurrency, answers=True),
            )
            rows.append([f"{num_blocks:,}", name, *(f"{100 * rate:.2f}" for rate in rates)])
    print(f"{args.trace.name}: {len(requests)} requests, % of prompt tokens found")
    print(format_table(header, rows))


class Slice:
    """Some requests of a trace, scaled down, as the simulation and as the engine see them."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        root = root_hash(
            model_fingerprint=FACTS.fingerprint, kv_dtype=FACTS.kv_dtype, block_size=BLOCK_SIZE
        )
        self._tokens = [_scaled(request) for request in requests]
        self._num_output = [-(-request.num_output_tokens // SCALE) for request in requests]
        self._prompts = [
            Prompt(list(hash_blocks(tokens, block_size=BLOCK_SIZE, root=root)), len(tokens))
            for tokens in self._tokens
        ]

    def replayed(self, name: str, num_blocks: int) -> float:
        policy, future = self._policy(name)
        return replay(
            self._prompts,
            num_blocks=num_blocks,
            policy=policy,
            block_size=BLOCK_SIZE,
            on_request=future.begin,
        ).hit_rate

    def served(self, name: str, num_blocks: int, *, concurrency: int, answers: bool) -> float:
        policy, future = self._policy(name)
        engine = make_engine(num_blocks=num_blocks, block_size=BLOCK_SIZE, policy=policy)

        def requests() -> Iterator[Request]:
            for number, tokens in enumerate(self._tokens):
                future.begin(number)
                yield as_request(number, tokens, self._num_output[number] if answers else 1)

        for _ in serve(engine, requests(), concurrency=concurrency):
            pass
        stats = engine.stats()
        return stats.num_hit_tokens / stats.num_prompt_tokens

    def _policy(self, name: str) -> tuple[PolicyFactory, FurthestNextUse]:
        future = FurthestNextUse([prompt.hashes for prompt in self._prompts])
        policies: dict[str, PolicyFactory] = {
            "LRU": by_score(lru),
            "S3-FIFO": S3Fifo,
            "ours": LowestUtility,
            "optimum": future.policy,
        }
        return policies[name], future


def _scaled(request: TraceRequest) -> TokenIds:
    """A 32nd of the prompt's tokens: equal blocks stay equal, and others different."""
    tokens = unscaled_token_ids(request)
    num_full = len(tokens) // TRACE_BLOCK_SIZE
    return tokens[::SCALE][: num_full * BLOCK_SIZE + 1 + len(tokens) % TRACE_BLOCK_SIZE // SCALE]


if __name__ == "__main__":
    main()
