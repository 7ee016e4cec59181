"""What a long hit costs the engine: hashing the prompt, finding its blocks, taking them.

    python -m bench.prefix_hit [--tokens 16384] [--block-sizes 4 8 16 32 64] [--repeats 30]

A prompt whose full blocks are all cached is asked for again and again, by an engine whose model
takes no time. Microseconds per request, medians: hashing (once, at admission), matching (there,
and when the request first runs), acquiring and releasing its blocks; and the two steps that
follow the first, each: a hit costs nothing there but the block table that ranks are sent.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from bench.trace_engine import as_request, make_engine

from quire.worker.bench.report import format_table
from quire.worker.bench.stopwatch import Stopwatch, Target
from quire.worker.blocks import BlockPool
from quire.worker.hashing import HashChain, TokenIds

PARTS = ("hash", "match", "acquire", "release")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()

    prompt = np.random.default_rng(0).integers(3, 32_000, args.tokens).astype(np.uint32)
    rows = [
        [str(block_size), *(f"{us:,.0f}" for us in _measure(prompt, block_size, args.repeats))]
        for block_size in args.block_sizes
    ]
    print(f"{args.tokens} prompt tokens, all cached but the last block; µs, median of requests")
    print(format_table(("block", *PARTS, "together", "first step", "later step"), rows))


def _measure(prompt: TokenIds, block_size: int, repeats: int) -> list[float]:
    engine = make_engine(
        num_blocks=len(prompt) // block_size + 8,
        block_size=block_size,
        max_num_batched_tokens=len(prompt),
    )
    stopwatch = Stopwatch()
    watched = stopwatch.watching(
        Target(HashChain, "extend", "hash"),
        *(Target(BlockPool, name, name) for name in PARTS[1:]),
    )
    times: list[list[float]] = []
    with watched:
        for number in range(repeats + 1):
            engine.add_request(as_request(number, prompt, 3))
            steps = [_time_us(engine.step) for _ in range(3)]
            assert not engine.has_work
            took_ns = stopwatch.take()
            parts = [took_ns[part] / 1e3 for part in PARTS]
            times.append([*parts, sum(parts), steps[0], steps[1]])
    hits = times[1:]  # The first request filled the cache.
    return [median(column) for column in zip(*hits, strict=True)]


def _time_us(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    main()
