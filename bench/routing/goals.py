"""Goals and results as a table. Goals are for 16 groups unless they name others."""

from collections.abc import Iterator
from dataclasses import replace

from bench.routing.cells import BOUND, DISTURBANCES, DYNAMO, OURS, OURS_POLICY, Cell
from bench.routing.compare import Cells, by_seed, ratio, to_best_baseline

_TTFT = {"conversation": 1.45, "multitenant": 2.8}
_CAPACITY = {"conversation": 1.03, "multitenant": 1.45}
_BEHIND = 1.02


def goals(cells: Cells) -> Iterator[str]:
    lines = list(_lines(cells))
    if lines:
        yield from ("| goal | seen |", "| --- | --- |", *lines, "")


def _lines(cells: Cells) -> Iterator[str]:
    for trace, factor in _TTFT.items():
        for row in (OURS, OURS_POLICY, BOUND):
            yield from _line(
                f"mean TTFT on {trace} ≥ {factor} × better than Dynamo's default ({row})",
                _to_dynamo(cells, trace, row),
            )
    for trace, factor in _CAPACITY.items():
        for row in (OURS, OURS_POLICY, BOUND):
            cell = Cell(trace=trace, num_groups=16, load=0.0, policy=row)
            found = ratio(
                by_seed(cells, cell), by_seed(cells, replace(cell, policy=DYNAMO)), "speed"
            )
            seen = "" if found is None else f"{found:.2f}"
            yield from _line(f"capacity on {trace} ≥ {factor} × Dynamo's default's ({row})", seen)
    for row in (OURS, OURS_POLICY):
        yield from _line(f"mean TTFT nowhere more than 2 % behind ({row})", _behind(cells, row))
    for name in DISTURBANCES:
        if name != "none":
            yield from _line(f"no collapse: {name}, growth of the mean", _growth(cells, name))


def _line(goal: str, seen: str) -> Iterator[str]:
    if seen:
        yield f"| {goal} | {seen} |"


def _to_dynamo(cells: Cells, trace: str, row: str) -> str:
    texts = []
    for load in sorted({cell.load for cell in cells if cell.load}):
        cell = Cell(trace=trace, num_groups=16, load=load, policy=row)
        found = ratio(by_seed(cells, replace(cell, policy=DYNAMO)), by_seed(cells, cell))
        if found is not None:
            texts.append(f"{found:.2f} at {load:.0%}")
    return ", ".join(texts)


def _behind(cells: Cells, row: str) -> str:
    """The row's distance to the best baseline, over all traces, sizes and loads."""
    ratios = {}
    for cell in cells:
        if cell.policy == row and cell.load and cell.disturbance == "none":
            found = to_best_baseline(cells, replace(cell, seed=0))
            if found is not None:
                ratios[replace(cell, seed=0)] = found
    if not ratios:
        return ""
    worse = {cell: found for cell, found in ratios.items() if found[0] > _BEHIND}
    text = f"{len(ratios) - len(worse)} of {len(ratios)}"
    order = sorted(worse, key=lambda cell: -worse[cell][0])
    missed = [
        f"{cell.trace}, {cell.num_groups} groups, {cell.load:.0%}: "
        f"{worse[cell][0] - 1:.0%} ({worse[cell][1]})"
        for cell in order
    ]
    return f"{text}; missed: {'; '.join(missed)}" if missed else text


def _growth(cells: Cells, disturbance: str) -> str:
    texts = []
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.disturbance == disturbance):
        ratios = []
        for cell in cells:
            if (cell.policy, cell.disturbance, cell.seed) == (policy, disturbance, 0):
                calm = by_seed(cells, replace(cell, disturbance="none"))
                found = ratio(by_seed(cells, cell), calm)
                if found is not None:
                    ratios.append(round(found - 1, 2) + 0.0)  # No "-0%".
        if ratios:
            texts.append(f"{policy} {min(ratios):.0%} to {max(ratios):.0%}")
    return ", ".join(texts)
