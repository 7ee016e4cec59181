"""Series of the last minutes, one point a second, computed from counters that only grow."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import Counter, Histogram

NUM_POINTS = 300
_WINDOW = 10
"""Number of points over which a point's rates and quantiles are computed."""


class Totals(NamedTuple):
    """Counts up to now, over all models."""

    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    first_tokens: Sequence[float]
    """Cumulative histogram of times to the first token: counts at or below each bound."""
    per_token: Sequence[float]
    """Cumulative histogram of times per output token."""


class Series:
    """Points of ``[time, TTFT p50, TTFT p99, TPOT p50, TPOT p99, tokens/s, hit rate, queued,
    running]``. Times are in seconds; a value without events is ``None``."""

    def __init__(self) -> None:
        self.points: deque[list[float | None]] = deque(maxlen=NUM_POINTS)
        self._totals: deque[tuple[float, Totals]] = deque(maxlen=_WINDOW + 1)

    def add(
        self,
        totals: Totals,
        *,
        ttft_bounds: Sequence[float],
        tpot_bounds: Sequence[float],
        num_queued: int,
        num_running: int,
        at_s: float,
        now_s: float,
    ) -> None:
        """``at_s``: the point's time, since 1970, for display. ``now_s``: a monotonic time, for
        rates."""
        self._totals.append((now_s, totals))
        before_s, before = self._totals[0]
        # Differences can be negative: a model that left took its counts along.
        ttft = [
            max(0.0, b - a) for a, b in zip(before.first_tokens, totals.first_tokens, strict=False)
        ]
        tpot = [max(0.0, b - a) for a, b in zip(before.per_token, totals.per_token, strict=False)]
        num_prompt = totals.prompt_tokens - before.prompt_tokens
        num_output = max(0.0, totals.output_tokens - before.output_tokens)
        point = [
            round(at_s, 1),
            quantile(0.5, ttft_bounds, ttft),
            quantile(0.99, ttft_bounds, ttft),
            quantile(0.5, tpot_bounds, tpot),
            quantile(0.99, tpot_bounds, tpot),
            num_output / (now_s - before_s) if now_s > before_s else 0.0,
            (totals.cached_tokens - before.cached_tokens) / num_prompt if num_prompt > 0 else None,
            num_queued,
            num_running,
        ]
        self.points.append([each if each is None else round(each, 4) for each in point])


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """A quantile like that of Prometheus' ``histogram_quantile``: linear within a bucket, and the
    last bound for values above it. ``counts`` are cumulative and have one more entry, for values
    above the last bound. ``None`` if nothing was counted."""
    if not counts or counts[-1] <= 0:
        return None
    rank = share * counts[-1]
    low = below = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count >= rank:
            return (
                low + (bound - low) * (rank - below) / (count - below) if count > below else bound
            )
        low, below = bound, count
    return bounds[-1]


def buckets(histograms: Iterable[Histogram]) -> list[float]:
    """The cumulative counts of histograms with equal bounds, summed."""
    counts = [
        [
            each.value
            for each in next(iter(histogram.collect())).samples
            if each.name.endswith("_bucket")
        ]
        for histogram in histograms
    ]
    return [sum(column) for column in zip(*counts, strict=True)]


def total(counters: Iterable[Counter]) -> float:
    """The sum of counters without labels."""
    return sum(
        each.value
        for counter in counters
        for each in next(iter(counter.collect())).samples
        if each.name.endswith("_total")
    )
