"""Tables of cells, in Markdown: a line per policy, means over the seeds."""

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from statistics import fmean

from bench.report import markdown
from bench.routing.cells import DYNAMO, OURS, OURS_POLICY, ROWS, SOURCES, Cell
from bench.routing.compare import Cells, Seeds, by_seed, ratio, to_best_baseline

_BEHIND = 1.02


def tables(cells: dict[str, dict[str, float]]) -> Iterator[str]:
    found = {Cell(**json.loads(key)): values for key, values in cells.items()}
    today = time.strftime("%Y-%m-%d")
    yield f"# Routing policies, {today}, {platform.machine()}, Python {platform.python_version()}\n"
    for policy in (OURS, OURS_POLICY):
        if summary := behind(found, policy):
            yield f"Mean TTFT of {policy} nowhere more than 2 % behind: {summary}\n"
    for num_groups, trace in product(
        sorted({cell.num_groups for cell in found}), sorted({cell.trace for cell in found})
    ):
        here = {c: v for c, v in found.items() if (c.num_groups, c.trace) == (num_groups, trace)}
        latency = {c: v for c, v in here.items() if c.load and c.disturbance == "none"}
        if latency:
            yield f"## {trace}, {num_groups} groups\n"
            yield (
                "TTFT in s, mean / p90 / p99 (× mean of Dynamo's default ÷ this one); seeds where "
                "more than one\n"
            )
            yield from _table(latency, lambda cell: f"{cell.load:.0%}", _times)
            yield from _closing(latency, OURS)
            yield from _closing(latency, OURS_POLICY)
        capacity = {c: v for c, v in here.items() if not c.load and len(v) > 2}
        if len({cell.policy for cell in capacity}) > 1:
            target = SOURCES[trace].target_s
            yield f"Capacity: the speed at which 99 % of requests wait {target} s at most\n"
            yield from _table(capacity, lambda cell: "speed", _speed)
        disturbed = {cell.policy for cell in here if cell.disturbance != "none"}
        robust = {c: v for c, v in here.items() if c.load == 0.78 and c.policy in disturbed}
        if robust:
            yield "Disturbed, at a load of 78 %\n"
            yield from _table(robust, lambda cell: cell.disturbance, _times)


def behind(cells: Cells, policy: str) -> str:
    """In how many of all traces, sizes and loads the policy is not behind the best baseline, and
    where it is."""
    ratios = {}
    for cell in {replace(cell, seed=0) for cell in cells if cell.policy == policy and cell.load}:
        found = to_best_baseline(cells, cell) if cell.disturbance == "none" else None
        if found is not None:
            ratios[cell] = found
    if not ratios:
        return ""
    worse = {cell: found for cell, found in ratios.items() if found[0] > _BEHIND}
    missed = [
        f"{cell.trace}, {cell.num_groups} groups, {cell.load:.0%}: {ratio - 1:.0%} ({whose})"
        for cell, (ratio, whose) in sorted(worse.items(), key=lambda item: -item[1][0])
    ]
    return "; ".join([f"{len(ratios) - len(worse)} of {len(ratios)}", *missed])


def _table(
    cells: Cells, column: Callable[[Cell], str], show: Callable[[Seeds, Seeds], str]
) -> Iterator[str]:
    columns: dict[str, Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.load):
        columns.setdefault(column(cell), replace(cell, seed=0))
    policies = [p for p in ROWS if any(c.policy == p for c in cells)]
    rows = []
    for policy in policies:
        texts = [policy]
        for cell in columns.values():
            mine = by_seed(cells, replace(cell, policy=policy))
            reference = by_seed(cells, replace(cell, policy=DYNAMO))
            texts.append(show(mine, reference) if mine else "")
        rows.append(texts)
    yield markdown(["policy", *columns], rows, num_left=1 + len(columns)) + "\n"


def _times(mine: Seeds, reference: Seeds) -> str:
    text = " / ".join(
        f"{fmean(values[name] for values in mine.values()):.3f}" for name in ("mean", "p90", "p99")
    )
    against = ratio(reference, mine)
    if against is not None:
        text += f" (×{against:.2f})"
    return f"{text}; {len(mine)}" if len(mine) > 1 else text


def _speed(mine: Seeds, reference: Seeds) -> str:
    speed = fmean(values["speed"] for values in mine.values())
    against = ratio(mine, reference, "speed")
    return f"{speed:.2f}" if against is None else f"{speed:.2f} (×{against:.2f})"


def _closing(cells: Cells, ours: str) -> Iterator[str]:
    """Where ours is furthest behind the best baseline of its column."""
    found = {
        cell: behind
        for cell in cells
        if cell.policy == ours
        and (behind := to_best_baseline(cells, replace(cell, seed=0))) is not None
    }
    if found:
        cell = max(found, key=lambda cell: found[cell][0])
        worst, whose = found[cell]
        yield (
            f"Mean TTFT of {ours} ÷ best baseline's, at most: {worst:.2f} "
            f"(load {cell.load:.0%}, {whose})\n"
        )
