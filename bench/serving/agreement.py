"""How closely predicted figures agree with measured ones: a table, and what it comes to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

NAMES = ("hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s")

_Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One run: figures by name, as measured and as several replays predict them."""

    label: str
    round: int
    measured: _Figures
    draws: Sequence[_Figures]

    @property
    def predicted(self) -> _Figures:
        return {name: median(draw[name] for draw in self.draws) for name in NAMES}

    @property
    def is_within(self) -> bool:
        """Whether the measured mean lies between the least and the most of the replays'."""
        means = [draw["ttft_mean_s"] for draw in self.draws]
        return min(means) <= self.measured["ttft_mean_s"] <= max(means)


def table(pairs: Sequence[Pair]) -> Iterator[str]:
    """Markdown: medians over the rounds, a line for each label."""
    by_label: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_label.setdefault(pair.label, []).append(pair)
    yield "predicted / measured; times to first token in ms\n"
    yield (
        "| policy | runs | hits | mean | p50 | p90 | mean, predicted ÷ measured | "
        "replays ÷ their median | runs within |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for label, mine in by_label.items():
        cells = [
            f"{100 * _middle(mine, 'predicted', 'hit_rate'):.1f} % / "
            f"{100 * _middle(mine, 'measured', 'hit_rate'):.1f} %"
        ]
        cells += [
            f"{1000 * _middle(mine, 'predicted', name):.1f} / "
            f"{1000 * _middle(mine, 'measured', name):.1f}"
            for name in NAMES[1:]
        ]
        cells += [_ratios(mine), _spread(mine), f"{sum(pair.is_within for pair in mine)}"]
        yield f"| {label} | {len(mine)} | {' | '.join(cells)} |"
    yield ""
    yield from _agreement(by_label)


def _middle(pairs: Sequence[Pair], side: str, name: str) -> float:
    figures: list[_Figures] = [getattr(pair, side) for pair in pairs]
    return median(each[name] for each in figures)


def _ratios(pairs: Sequence[Pair]) -> str:
    ratios = [pair.predicted["ttft_mean_s"] / pair.measured["ttft_mean_s"] for pair in pairs]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _spread(pairs: Sequence[Pair]) -> str:
    """How far the mean TTFTs of a run's replays are from each other, in the middle run."""
    least, most = [], []
    for pair in pairs:
        means = [draw["ttft_mean_s"] for draw in pair.draws]
        least.append(min(means) / median(means))
        most.append(max(means) / median(means))
    return f"{median(least):.2f} to {median(most):.2f}"


def _agreement(by_label: dict[str, list[Pair]]) -> Iterator[str]:
    gaps = [
        abs(pair.predicted["hit_rate"] - pair.measured["hit_rate"])
        for mine in by_label.values()
        for pair in mine
    ]
    yield (
        f"Hit rates differ by {100 * np.mean(gaps):.1f} points on average over all runs, by "
        f"{100 * max(gaps):.1f} at most."
    )
    if len(by_label) < 2:
        return
    for name, what in (("hit_rate", "hit rate"), ("ttft_mean_s", "mean TTFT")):
        yield _order(by_label, name, what)
    ratios = [
        (_middle(a, "predicted", "ttft_mean_s") / _middle(b, "predicted", "ttft_mean_s"))
        / (_middle(a, "measured", "ttft_mean_s") / _middle(b, "measured", "ttft_mean_s"))
        for a, b in combinations(by_label.values(), 2)
    ]
    off = float(np.exp(np.mean(np.abs(np.log(ratios)))))
    yield f"The ratio of two lines' mean TTFT is predicted to a factor of {off:.2f} on average.\n"


def _order(by_label: dict[str, list[Pair]], name: str, what: str) -> str:
    """Medians are compared. A pair is clear if it was measured in the same order in each round."""
    num_pairs = num_alike = num_clear = num_clear_alike = 0
    for a, b in combinations(by_label.values(), 2):
        is_less = _middle(a, "measured", name) < _middle(b, "measured", name)
        is_alike = is_less == (_middle(a, "predicted", name) < _middle(b, "predicted", name))
        theirs = {pair.round: pair.measured[name] for pair in b}
        rounds = [pair.measured[name] < theirs[pair.round] for pair in a if pair.round in theirs]
        is_clear = len(rounds) > 1 and all(less == is_less for less in rounds)
        num_pairs += 1
        num_alike += is_alike
        num_clear += is_clear
        num_clear_alike += is_clear and is_alike
    return (
        f"By {what}, {num_alike} of {num_pairs} pairs of lines are in the same order, and "
        f"{num_clear_alike} of the {num_clear} that were measured in one order in every round."
    )
