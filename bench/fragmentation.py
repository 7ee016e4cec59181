"""How much of the held KV cache is empty: wasted slots / held slots, by block size, on a trace.

    python -m bench.fragmentation TRACE.jsonl [--requests 1000] [--concurrency 32]

Serves the trace's prompts and output lengths through the real scheduler and block pool, at most
``--concurrency`` at a time, with a model that takes no time. After every step the engine says how
many slots of held blocks have no token; the mean is over all steps. Traces are in Mooncake's
format: ``{"input_length": …, "output_length": …, "hash_ids": […]}`` a line.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.trace_engine import (
    TraceRequest,
    as_request,
    make_engine,
    read_requests,
    serve,
    token_ids,
)

from quire.worker.bench.report import format_table

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000, help="the first so many")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES)
    parser.add_argument("--cache-tokens", type=int, default=1 << 20, help="slots of the KV cache")
    args = parser.parse_args()

    requests = read_requests(args.trace, limit=args.requests)
    prompt, output = (
        sum(lengths) / len(requests)
        for lengths in zip(
            *((one.num_tokens, one.num_output_tokens) for one in requests), strict=True
        )
    )
    print(
        f"{args.trace.name}: {len(requests)} requests, {prompt:,.0f} prompt and {output:,.0f} "
        f"output tokens on average, {args.concurrency} at a time, {args.cache_tokens:,} slots"
    )
    rows = [
        [str(block_size), *_measure(requests, block_size, args.cache_tokens, args.concurrency)]
        for block_size in args.block_sizes
    ]
    header = ("block", "steps", "held tokens", "wasted, mean", "max", "preempted", "hits")
    print(format_table(header, rows))


def _measure(
    requests: Sequence[TraceRequest], block_size: int, num_slots: int, concurrency: int
) -> list[str]:
    engine = make_engine(num_blocks=num_slots // block_size, block_size=block_size)
    num_wasted = num_held = num_steps = 0
    worst = 0.0
    stream = (
        as_request(number, token_ids(request), request.num_output_tokens)
        for number, request in enumerate(requests)
    )
    for _ in serve(engine, stream, concurrency=concurrency):
        stats = engine.stats()
        num_steps += 1
        num_wasted += stats.num_wasted_slots
        num_held += stats.num_held_slots
        if stats.num_held_slots:
            worst = max(worst, stats.num_wasted_slots / stats.num_held_slots)
    stats = engine.stats()
    return [
        f"{num_steps:,}",
        f"{(num_held - num_wasted) / num_steps:,.0f}",
        f"{num_wasted / num_held:.3%}",
        f"{worst:.3%}",
        f"{stats.num_preemptions}",
        f"{stats.num_hit_tokens / stats.num_prompt_tokens:.1%}",
    ]


if __name__ == "__main__":
    main()
