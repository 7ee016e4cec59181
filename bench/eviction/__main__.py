"""Compares eviction policies: the share of prompts found in the cache, and the policy's cost.

    python -m bench.eviction [--data ../shared/data] [--workload NAME ...]

Replays traces and synthetic workloads through the real block pool at several sizes. In each cell:
per cent of prompt tokens found in the cache / per cent of prefill cost saved (an 8B model's; it
grows with the position). `halves` is a KV cache of half the blocks, and host memory of the other
half; a dash if a prompt does not fit the KV cache. `optimum` knows the future (Belady). The last
table is the CPU time of pool and policy together per block of a prompt; the difference to LRU's
column is the cost of the policy.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.eviction.baselines import FurthestNextUse, Lru
from bench.eviction.replay import (
    Prompt,
    Savings,
    agents,
    load_trace,
    long_tails,
    periodic,
    replay,
    scans,
    sessions,
)
from bench.eviction.two_tiers import replay_in_two_tiers
from bench.report import command

from quire.worker.cache.eviction import LowestUtility, PolicyFactory
from quire.worker.request.errors import NoFreeBlocks

POLICIES: dict[str, PolicyFactory] = {
    "LRU": Lru,
    "ours": LowestUtility,
}
TRACES = {
    "conversation": ("mooncake_conversation_trace.jsonl", (1000, 2000, 4000, 8000, 16000)),
    "multitenant": ("multitenant_like.jsonl", (250, 500, 1000, 2000)),
}
WORKLOADS: dict[str, tuple[Callable[[], list[Prompt]], Sequence[int]]] = {
    "agents": (agents, (500, 1000, 2000)),
    "sessions": (sessions, (900, 1800, 2700)),
    "scans": (scans, (250, 500, 1000)),
    "long_tails": (long_tails, (200, 400, 800)),
    "periodic": (periodic, (200, 400, 800, 1200)),
}


def main() -> None:
    parser = command("bench.eviction", __doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    names = [*TRACES, *WORKLOADS]
    parser.add_argument("--workload", nargs="*", choices=names, default=names)
    args = parser.parse_args()

    ns_per_block: dict[str, dict[str, float]] = {}
    for name in args.workload:
        if name in WORKLOADS:
            make, sizes = WORKLOADS[name]
            prompts = make()
        else:
            file, sizes = TRACES[name]
            path = args.data / "traces" / file
            if not path.exists():
                print(f"{name}: skipped, {path} does not exist (say --data FOLDER)\n")
                continue
            prompts = load_trace(path)
        print(f"{name}: {len(prompts):,} prompts, {sum(p.num_tokens for p in prompts):,} tokens")
        _print_row("blocks", [*POLICIES, "halves", "optimum"])
        for num_blocks in sizes:
            cells, times = _compare(prompts, num_blocks)
            ns_per_block[name] = times
            _print_row(
                f"{num_blocks:,}",
                [
                    f"{100 * each.hit_rate:.1f} / {100 * each.saved_rate:.1f}" if each else "-"
                    for each in cells.values()
                ],
            )
        print()
    print("CPU ns per block of a prompt, at the largest size")
    _print_row("", list(POLICIES))
    for name, times in ns_per_block.items():
        _print_row(name, [f"{ns:.0f}" for ns in times.values()])


def _compare(
    prompts: list[Prompt], num_blocks: int
) -> tuple[dict[str, Savings | None], dict[str, float]]:
    num_hashes = sum(len(prompt.hashes) for prompt in prompts)
    cells: dict[str, Savings | None] = {}
    times = {}
    for name, policy in POLICIES.items():
        begin = time.thread_time_ns()
        cells[name] = replay(prompts, num_blocks=num_blocks, policy=policy)
        times[name] = (time.thread_time_ns() - begin) / num_hashes
    half = num_blocks // 2
    try:
        cells["halves"] = replay_in_two_tiers(prompts, num_blocks=half, num_kept=half)
    except NoFreeBlocks:
        cells["halves"] = None
    future = FurthestNextUse([prompt.hashes for prompt in prompts])
    cells["optimum"] = replay(
        prompts, num_blocks=num_blocks, policy=future.policy, on_request=future.begin
    )
    return cells, times


def _print_row(head: str, cells: Sequence[str]) -> None:
    print(f"{head:>12} " + " ".join(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
