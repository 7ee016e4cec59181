"""Comparisons of cells, always over the seeds that both sides have."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from bench.routing.cells import BASELINES, Cell

Cells = Mapping[Cell, dict[str, float]]
Seeds = Mapping[int, dict[str, float]]


def by_seed(cells: Cells, cell: Cell) -> Seeds:
    """The values of ``cell`` for each seed that it was run with."""
    return {c.seed: values for c, values in cells.items() if replace(c, seed=cell.seed) == cell}


def ratio(some: Seeds, others: Seeds, name: str = "mean") -> float | None:
    """Mean of ``name`` of some ÷ that of others; None where they have no seed in common."""
    seeds = some.keys() & others.keys()
    if not seeds:
        return None
    return fmean(some[s][name] for s in seeds) / fmean(others[s][name] for s in seeds)


def to_best_baseline(cells: Cells, cell: Cell) -> tuple[float, str] | None:
    """Mean TTFT of ``cell`` ÷ that of the best other system's policy there, and whose that is."""
    ours = by_seed(cells, cell)
    ratios = [
        (found, policy)
        for policy in BASELINES
        if (found := ratio(ours, by_seed(cells, replace(cell, policy=policy)))) is not None
    ]
    return max(ratios, default=None)
