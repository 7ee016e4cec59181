"""An exponentially decayed sum of seconds."""

import time
from collections.abc import Callable
from math import exp

_FADES_S = 60.0


class RecentSeconds:
    """A sum that decays exponentially, to about a third in one minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sum_s = 0.0
        self._as_of_s = clock()

    @property
    def sum_s(self) -> float:
        return self._sum_s * exp((self._as_of_s - self._clock()) / _FADES_S)

    def add(self, seconds: float) -> None:
        self._sum_s, self._as_of_s = self.sum_s + seconds, self._clock()
