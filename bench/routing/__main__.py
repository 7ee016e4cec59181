"""Compares routing policies on traces: times to first token, capacity, robustness.

    python -m bench.routing --data FOLDER [--trace NAME ...] [--groups N ...] [--load SHARE ...]
                            [--part latency capacity robust] [--seeds N] [--state FILE]

Simulated with the costs of an 8B model on an H100 and 1M tokens of KV cache per group. Other
systems' policies run on engines that serve first come first served and evict the least recently
used; so does ``ours, LRU``. ``ours`` evicts by utility and computes the shortest remaining prefill
first, as our engine does. ``one cache`` is ours with one infinite cache for all groups: the upper
bound of any policy. The first tenth of the requests warms up caches and is not counted.

A *load* is a share of the capacity of Dynamo's default: the fastest replay at which 99 % of
requests wait no longer than the trace's target. Beside the recorded traces, which are the default,
there are made-up ones (`bench.routing.made_up`). More than 16 groups serve copies of the trace that
share nothing. Each cell is written to the state file when it is done, and not computed again: to
stop and go on is to run the same command again. ``--report`` only prints what is there.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench.report import command
from bench.routing.cells import DISTURBANCES, DYNAMO, LOADS, ROWS, SOURCES, Bench, Cell
from bench.routing.report import tables


def main() -> None:
    parser = command("bench.routing", __doc__)
    add = parser.add_argument
    add("--data", type=Path, default=Path("../shared/data"), help="has traces/ in it")
    recorded = [name for name, source in SOURCES.items() if source.file]
    add("--trace", nargs="+", choices=SOURCES, default=recorded)
    add("--groups", type=int, nargs="+", default=[16, 4, 64])
    add("--load", type=float, nargs="+", default=LOADS)
    add("--policy", nargs="+", choices=ROWS, default=list(ROWS))
    parts = ("latency", "capacity", "robust")
    add("--part", nargs="+", choices=parts, default=parts)
    add("--seeds", type=int, default=5)
    add("--state", type=Path, default=Path("bench-routing.jsonl"))
    add("--output", type=Path, help="a Markdown file for the tables")
    add("--report", action="store_true", help="run nothing, print what the state file has")
    arguments = parser.parse_args()
    bench = Bench(data=arguments.data, state=arguments.state)
    if not arguments.report:
        for trace in list(arguments.trace):
            name = SOURCES[trace].file
            file = arguments.data / "traces" / (name or ".")
            if name is not None and not file.exists():
                print(f"{trace}: skipped, {file} does not exist (say --data FOLDER)")
                arguments.trace.remove(trace)
        for cell in _wanted(arguments):
            bench.run(cell)
    text = "\n".join(tables(bench.cells))
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


def _wanted(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Seeds outermost: whenever it is stopped, what is there is spread over everything else."""
    for seed, num_groups, trace in product(
        range(arguments.seeds), arguments.groups, arguments.trace
    ):
        cell = Cell(trace=trace, num_groups=num_groups, load=0.0, policy=DYNAMO, seed=seed)
        if "latency" in arguments.part:
            for load, policy in product(arguments.load, arguments.policy):
                yield replace(cell, load=load, policy=policy)
        if "capacity" in arguments.part:
            for policy in arguments.policy:
                yield replace(cell, policy=policy)
        if "robust" in arguments.part:
            for disturbance, policy in product(DISTURBANCES, arguments.policy):
                yield replace(cell, load=0.78, policy=policy, disturbance=disturbance)


if __name__ == "__main__":
    main()
