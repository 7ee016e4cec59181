"""What explaining decisions costs: from tokens to a decision, with a log of them and without.

    python -m bench.explanations [--groups N …] [--rounds N]

Prompts of 16,384 tokens, of which nothing is cached; every group has been seen often enough to
have a forecast. Two tables, of which one keeps no decisions, are asked in turn, so that whatever
else the machine does falls on both. Also times `RoutingTable.started`, which learns from the wait.
Prints a table; times are medians in microseconds.
"""

import argparse
import time
from statistics import median

import numpy as np

from quire.router.config import RoutingConfig
from quire.router.directory import GroupId
from quire.router.pace import MIN_OBSERVATIONS
from quire.router.table import GroupLoad, RoutingTable
from quire.worker.hashing import hash_blocks, root_hash

NUM_TOKENS = 16_384
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    print("| groups | hashing | decision, no log | with log | ratio | tokens to decision: ratio |")
    print("|---|---|---|---|---|---|")
    for num_groups in arguments.groups:
        print(_row(num_groups, arguments.rounds))
    print(f"\n`started`: {_started_us(arguments.rounds):.1f} µs")


def _row(num_groups: int, rounds: int) -> str:
    tables = [_table(num_groups, max_decisions_kept=kept) for kept in (0, 1024)]
    root = root_hash(model_fingerprint="m", kv_dtype="f", block_size=BLOCK_SIZE)
    tokens = np.arange(NUM_TOKENS, dtype=np.uint32)
    hashing: list[float] = []
    deciding: list[list[float]] = [[], []]
    for number in range(rounds):
        tokens[0] = number
        begin = time.perf_counter()
        hashes = hash_blocks(tokens, block_size=BLOCK_SIZE, root=root)
        hashing.append(time.perf_counter() - begin)
        # In turn, and each as often the first, which finds the hashes not in the CPU's cache.
        for which in (0, 1) if number % 2 else (1, 0):
            name, table = str(number), tables[which]
            begin = time.perf_counter()
            table.route(name, hashes=hashes, num_prompt_tokens=NUM_TOKENS)
            deciding[which].append(time.perf_counter() - begin)
            table.completed(name)
    hash_us = 1e6 * median(hashing)
    without_us, with_us = (1e6 * median(times) for times in deciding)
    whole = (hash_us + with_us) / (hash_us + without_us)
    return (
        f"| {num_groups} | {hash_us:.1f} | {without_us:.1f} | {with_us:.1f} "
        f"| {with_us / without_us:.2f} | {whole:.2f} |"
    )


def _started_us(rounds: int) -> float:
    table = _table(8, max_decisions_kept=1024)
    times = []
    for number in range(rounds):
        table.route(str(number), hashes=(), num_prompt_tokens=100 + number % 50)
        begin = time.perf_counter()
        table.started(str(number), num_cached_tokens=0)
        times.append(time.perf_counter() - begin)
        table.completed(str(number))
    return 1e6 * median(times)


def _table(num_groups: int, *, max_decisions_kept: int) -> RoutingTable:
    table = RoutingTable(
        block_size=BLOCK_SIZE, config=RoutingConfig(max_decisions_kept=max_decisions_kept)
    )
    groups = [GroupId(f"g{number}") for number in range(num_groups)]
    table.update_members(groups)
    for number, group in enumerate(groups):
        for _ in range(MIN_OBSERVATIONS):
            others = frozenset(groups) - {group}
            table.route("warm up", hashes=(), num_prompt_tokens=100, exclude=others)
            table.started("warm up", num_cached_tokens=0)
        table.update_load(
            group,
            GroupLoad(
                num_running=5 + number % 7,
                num_waiting=number % 3,
                num_pending_prefill_tokens=1000 * (number % 5),
                num_available_blocks=10_000,
            ),
        )
    table.completed("warm up")
    return table


if __name__ == "__main__":
    main()
