"""The result of a simulation: a column per quantity, and summaries."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Result:
    """One entry per request, in order of arrival."""

    num_groups: int
    num_input: Sequence[int]
    arrival_ms: Sequence[float]
    first_token_ms: Sequence[float]
    last_token_ms: Sequence[float]
    group: Sequence[int]
    predicted_hit: Sequence[int]
    """Tokens that the router expected in the group's cache."""
    hit: Sequence[int]
    """Tokens that were there."""

    def after(self, share: float) -> "Result":
        """Without the first ``share`` of the requests, which found caches empty."""
        begin = int(share * len(self.arrival_ms))
        return Result(
            num_groups=self.num_groups,
            num_input=self.num_input[begin:],
            arrival_ms=self.arrival_ms[begin:],
            first_token_ms=self.first_token_ms[begin:],
            last_token_ms=self.last_token_ms[begin:],
            group=self.group[begin:],
            predicted_hit=self.predicted_hit[begin:],
            hit=self.hit[begin:],
        )

    @cached_property
    def ttft_s(self) -> NDArray[np.float64]:
        first = np.asarray(self.first_token_ms, dtype=np.float64)
        ttft: NDArray[np.float64] = (first - np.asarray(self.arrival_ms, dtype=np.float64)) / 1000
        return ttft

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens found in a cache."""
        return sum(self.hit) / max(sum(self.num_input), 1)

    @property
    def prediction_error(self) -> float:
        """Tokens by which predictions were wrong, as a share of prompt tokens."""
        wrong = np.abs(np.asarray(self.predicted_hit) - np.asarray(self.hit)).sum()
        return float(wrong) / max(sum(self.num_input), 1)

    @property
    def balance(self) -> float:
        """The most prompt tokens that a group computed, over the mean."""
        computed = np.asarray(self.num_input) - np.asarray(self.hit)
        by_group = np.bincount(self.group, weights=computed, minlength=self.num_groups)
        return float(by_group.max() / by_group.mean()) if by_group.sum() else 1.0

    @property
    def duration_s(self) -> float:
        return max(self.last_token_ms, default=0.0) / 1000

    def ttft_quantile_s(self, quantile: float) -> float:
        return float(np.quantile(self.ttft_s, quantile))

    @property
    def digest(self) -> str:
        """Equal for equal results."""
        columns = (self.first_token_ms, self.last_token_ms, self.group, self.hit)
        data = b"".join(np.asarray(column, dtype=np.float64).tobytes() for column in columns)
        return hashlib.sha256(data).hexdigest()[:16]
