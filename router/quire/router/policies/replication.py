"""Exponentially decayed sums of the wait that a second copy of a prefix would have saved."""

from collections.abc import Hashable
from math import exp


class Regrets:
    """Exponentially decayed sum per key, for the ``max_keys`` most recently added to.

    Every operation takes O(1).
    """

    def __init__(self, *, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._sums: dict[Hashable, tuple[float, float]] = {}  # Sum and its time; latest last.

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, key: Hashable, regret: float, *, at: float) -> float:
        """Adds ``regret`` and returns the sum. ``at`` is a time that never goes back; within 1 of
        its units a sum decays to a third (1/e)."""
        before, then = self._sums.pop(key, (0.0, at))
        total = before * exp(then - at) + regret
        self._sums[key] = total, at
        if len(self._sums) > self._max_keys:
            del self._sums[next(iter(self._sums))]
        return total

    def forget(self, key: Hashable) -> None:
        self._sums.pop(key, None)
