"""Tables of cells, in Markdown: a line per policy, means over the seeds."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import fmean

from bench.routing.cells import BASELINES, DYNAMO, OURS, OURS_POLICY, ROWS, SOURCES, Cell

Values = list[dict[str, float]]
Cells = dict[Cell, dict[str, float]]


def tables(cells: dict[str, dict[str, float]]) -> Iterator[str]:
    found = {Cell(**json.loads(key)): values for key, values in cells.items()}
    today = time.strftime("%Y-%m-%d")
    yield f"# Routing policies, {today}, {platform.machine()}, Python {platform.python_version()}\n"
    for num_groups, trace in product(
        sorted({cell.num_groups for cell in found}), sorted({cell.trace for cell in found})
    ):
        here = {c: v for c, v in found.items() if (c.num_groups, c.trace) == (num_groups, trace)}
        latency = {c: v for c, v in here.items() if c.load and c.disturbance == "none"}
        if latency:
            yield f"## {trace}, {num_groups} groups\n"
            yield "TTFT in s, mean / p90 / p99 (× mean of Dynamo's default ÷ this one)\n"
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


def _table(
    cells: Cells, column: Callable[[Cell], str], show: Callable[[Values, Values], str]
) -> Iterator[str]:
    in_order = sorted(cells, key=lambda cell: cell.load)
    columns = list(dict.fromkeys(column(cell) for cell in in_order))
    policies = [p for p in ROWS if any(c.policy == p for c in cells)]
    yield "| policy | " + " | ".join(columns) + " |"
    yield "| --- |" + " --- |" * len(columns)
    for policy in policies:
        texts = []
        for name in columns:
            of_column = {c: v for c, v in cells.items() if column(c) == name}
            mine = [v for c, v in of_column.items() if c.policy == policy]
            reference = [v for c, v in of_column.items() if c.policy == DYNAMO]
            texts.append(show(mine, reference) if mine else "")
        yield f"| {policy} | " + " | ".join(texts) + " |"
    yield ""


def _times(values: Values, reference: Values) -> str:
    times = " / ".join(f"{_mean(values, name):.3f}" for name in ("mean", "p90", "p99"))
    if not reference:
        return times
    return f"{times} (×{_mean(reference, 'mean') / _mean(values, 'mean'):.2f})"


def _speed(values: Values, reference: Values) -> str:
    speed = _mean(values, "speed")
    return (
        f"{speed:.2f} (×{speed / _mean(reference, 'speed'):.2f})" if reference else f"{speed:.2f}"
    )


def _closing(cells: Cells, ours: str) -> Iterator[str]:
    """Where ours is furthest behind the best baseline of its column."""
    worst = ("", 0.0)
    for load in {cell.load for cell in cells}:
        means = {
            policy: _mean([v for c, v in cells.items() if (c.load, c.policy) == (load, policy)])
            for policy in {cell.policy for cell in cells if cell.load == load}
        }
        others = [mean for policy, mean in means.items() if policy in BASELINES]
        if ours in means and others:
            ratio = means[ours] / min(others)
            worst = max(worst, (f"{load:.0%}", ratio), key=lambda pair: pair[1])
    if worst[0]:
        yield f"Mean TTFT of {ours} ÷ best baseline's, at most: {worst[1]:.2f} (load {worst[0]})\n"


def _mean(values: Sequence[dict[str, float]], name: str = "mean") -> float:
    return fmean(value[name] for value in values)
