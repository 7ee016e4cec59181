"""What steps cost, from the steps that timed runs kept: measured in the very runs to be simulated.

    step ms = (prefill + decode) * (1 + contention * others)

with the two terms of `quire.router.simulate.cost`, and ``others`` the groups that computed while
the step ran, on average. Least squares, nothing below 0. What lies between two steps of a busy
group counts as part of the first.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np
from bench.serving.timed import Line
from numpy.typing import NDArray

from quire.router.simulate.cost import CostModel
from quire.worker.errors import ConfigError

_LONGEST_GAP_S = 0.005
"""Between two steps without a pause."""
_ROUNDS = 50

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepFit:
    cost: CostModel
    contention: float
    num_steps: int
    explained: float
    """The share of the steps' variance."""
    on_cpu: float
    """The share of the steps' time that the thread had a core."""


def fit_steps(runs: Sequence[Sequence[Line]], *, num_cache_tokens: int) -> StepFit:
    """``runs`` are the lines of `bench.serving.timed.read_lines`, run by run.

    Raises:
        ConfigError: They hold too few steps with prompt tokens, or without; or what they took does
            not follow from what was in them.
    """
    rows: list[tuple[float, ...]] = []
    took: list[float] = []
    others: list[float] = []
    wall_s = cpu_s = 0.0
    for lines in runs:
        by_group = steps_by_group(lines)
        for group, steps in by_group.items():
            busy = [_Busy(theirs) for name, theirs in by_group.items() if name != group]
            for step, next_begin_s in zip(steps, _next_begins(steps), strict=True):
                rows.append(_terms(step, num_cache_tokens))
                took.append(1000 * (next_begin_s - step["begin_s"]))
                others.append(sum(b.share(step["begin_s"], step["end_s"]) for b in busy))
                wall_s += step["end_s"] - step["begin_s"]
                cpu_s += step["cpu_s"]
    terms, took_ms, num_others = np.array(rows), np.array(took), np.array(others)
    if len(rows) < 20 or not terms.any(axis=0).all():
        raise ConfigError(f"{len(rows)} steps were kept: too few kinds of them to fit costs to")
    contention = 0.0
    for _ in range(_ROUNDS):
        slower = 1 + contention * num_others
        rates = _not_negative(terms * slower[:, None], took_ms)
        alone = terms @ rates
        along = alone * num_others
        contention = max(float(along @ (took_ms - alone) / max(along @ along, 1e-9)), 0.0)
    left = took_ms - alone * (1 + contention * num_others)
    base, per_token, per_product, decode_base, decode_linear = rates.tolist()
    if not (base or per_token) or not (decode_base or decode_linear):
        raise ConfigError(
            f"{len(rows)} steps were kept, and by the best fit prefills or decodes take no time: "
            "too much else went on beside them; run them again, longer or on a quieter machine"
        )
    return StepFit(
        cost=CostModel(
            base=base,
            per_token=per_token,
            # Within a chunk, a token attends to half of the others on average.
            per_token2=per_product / 2,
            per_context=per_product,
            decode_base=decode_base,
            decode_linear=decode_linear,
            num_cache_tokens=num_cache_tokens,
        ),
        contention=contention,
        num_steps=len(rows),
        explained=float(1 - left.var() / took_ms.var()),
        on_cpu=cpu_s / wall_s,
    )


def steps_by_group(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """In the order of time."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "step":
            found.setdefault(line["by"], []).append(line)
    return found


def _terms(step: Line, num_cache_tokens: int) -> tuple[float, ...]:
    """What the rates are multiplied with: base, per_token, products, decode_base and _linear."""
    prefill, decodes = step["prefill"], step["decodes"]
    return (
        float(prefill > 0),
        float(prefill),
        step["products"] + prefill**2 / 2,
        float(decodes > 0),
        min(step["context"] / num_cache_tokens, 1.0),
    )


def _next_begins(steps: Sequence[Line]) -> list[float]:
    gaps = [b["begin_s"] - a["end_s"] for a, b in pairwise(steps)]
    short = [gap for gap in gaps if gap < _LONGEST_GAP_S]
    mean_s = sum(short) / len(short) if short else 0.0
    return [
        step["end_s"] + (gap if gap < _LONGEST_GAP_S else mean_s)
        for step, gap in zip(steps, [*gaps, _LONGEST_GAP_S], strict=True)
    ]


class _Busy:
    """When a group computed."""

    def __init__(self, steps: Sequence[Line]) -> None:
        self._begins: list[float] = [step["begin_s"] for step in steps]
        self._lasted: list[float] = [step["end_s"] - step["begin_s"] for step in steps]
        self._sums = [0.0, *accumulate(self._lasted)]

    def share(self, begin_s: float, end_s: float) -> float:
        """The share of the time in which it did."""
        return (self._until(end_s) - self._until(begin_s)) / max(end_s - begin_s, 1e-9)

    def _until(self, time_s: float) -> float:
        index = bisect_right(self._begins, time_s)
        if not index:
            return 0.0
        last = min(time_s - self._begins[index - 1], self._lasted[index - 1])
        return self._sums[index - 1] + last


def _not_negative(terms: NDArray[np.float64], wanted: Vector) -> Vector:
    """Least squares with no rate below 0: the best of those that leave some of the terms out."""
    scale = np.sqrt((terms**2).sum(axis=0))
    scale[scale == 0] = 1.0
    gram, target = (terms / scale).T @ (terms / scale), (terms / scale).T @ wanted
    best, least = np.zeros(len(scale)), 0.0
    for is_used in product((False, True), repeat=len(scale)):
        used = np.flatnonzero(is_used)
        rates = np.zeros(len(scale))
        rates[used] = np.linalg.lstsq(gram[np.ix_(used, used)], target[used], rcond=None)[0]
        error = float(rates @ gram @ rates - 2 * rates @ target)
        if rates.min() >= 0 and error < least:
            best, least = rates, error
    found: Vector = best / scale
    return found
