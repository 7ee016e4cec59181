"""Measures how accurate routing's predictions were, when a request's first token arrives.

The predictions are the number of cached prompt tokens and the wait for the first token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

ERROR_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ERROR_BUCKETS_RATIO = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0)

_MIN_WAIT_S = 1e-3
_GROUP_RATE = 0.05
"""Weight of the latest sample in a moving mean: the mean covers about 20 samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyStats:
    """Accuracy of predictions, over requests whose first token has arrived."""

    num_predicted_tokens: int
    """Prompt tokens predicted to be cached."""
    num_cached_tokens: int
    """Prompt tokens actually found in the cache."""
    num_wrong_tokens: int
    """Prompt tokens predicted but not found, or found but not predicted."""
    num_forecasts: int
    """Requests that had a forecast of their wait: the group had enough observations."""
    forecast_s: float
    """Sum of the forecasts."""
    waited_s: float
    """Sum of the actual waits of the requests that had a forecast."""
    errors_s: "HistogramStats"
    """Absolute difference of forecast and wait, in seconds."""
    errors_ratio: "HistogramStats"
    """Absolute difference of forecast and wait, as a share of the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramStats:
    bounds: Sequence[float]
    counts: Sequence[int]
    """Number of values in each bucket; the last bucket has no upper bound."""
    total: float
    """Sum of all values."""


class Accuracy:
    def __init__(self) -> None:
        self._num_predicted_tokens = 0
        self._num_cached_tokens = 0
        self._num_wrong_tokens = 0
        self._num_forecasts = 0
        self._forecast_s = 0.0
        self._waited_s = 0.0
        self._errors_s = _Histogram(ERROR_BUCKETS_S)
        self._errors_ratio = _Histogram(ERROR_BUCKETS_RATIO)

    def count_cached(self, *, num_predicted_tokens: int, num_cached_tokens: int) -> None:
        self._num_predicted_tokens += num_predicted_tokens
        self._num_cached_tokens += num_cached_tokens
        self._num_wrong_tokens += abs(num_predicted_tokens - num_cached_tokens)

    def count_wait(self, *, forecast_s: float, waited_s: float) -> float:
        """Counts a forecast against the actual wait; returns the error as a share of the wait."""
        error_s = abs(forecast_s - waited_s)
        ratio = error_s / max(waited_s, _MIN_WAIT_S)
        self._num_forecasts += 1
        self._forecast_s += forecast_s
        self._waited_s += waited_s
        self._errors_s.add(error_s)
        self._errors_ratio.add(ratio)
        return ratio

    def stats(self) -> AccuracyStats:
        return AccuracyStats(
            num_predicted_tokens=self._num_predicted_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_wrong_tokens=self._num_wrong_tokens,
            num_forecasts=self._num_forecasts,
            forecast_s=self._forecast_s,
            waited_s=self._waited_s,
            errors_s=self._errors_s.stats(),
            errors_ratio=self._errors_ratio.stats(),
        )


def moved_mean(mean: float | None, sample: float) -> float:
    """A mean over about the last twenty samples, this one included."""
    return sample if mean is None else mean + _GROUP_RATE * (sample - mean)


class ComputedShare:
    """The share of prompt tokens that no cache has, over about the last 20,000 of them."""

    _PRIOR_TOKENS = 100.0
    """Uncached tokens assumed to have been seen at the start."""
    _MEMORY_TOKENS = 20_000.0

    def __init__(self) -> None:
        self._num_tokens = self._num_computed = self._PRIOR_TOKENS

    @property
    def share(self) -> float:
        return self._num_computed / self._num_tokens

    def add(self, num_tokens: int, num_cached: int) -> None:
        """Counts a prompt of ``num_tokens``, of which ``num_cached`` were cached."""
        kept = exp(-num_tokens / self._MEMORY_TOKENS)
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._num_computed = self._num_computed * kept + num_tokens - num_cached


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def stats(self) -> HistogramStats:
        return HistogramStats(bounds=self.bounds, counts=tuple(self.counts), total=self.total)
