"""A group's time to first token, learned from its requests; nothing is configured.

    wait = own * missing + ahead * queued + beside * sequences + fixed

    wait       seconds from routing to the first token
    missing    prompt tokens that the group computes for the request itself
    queued     those that it had before it when the request was sent
    sequences  requests that were with it then
    fixed      what every request takes: a step, the way there and back

None of the four is negative. They are the least squares of *relative* errors over about the last
`WINDOW` requests, so that short waits count as much as long ones. A queued token is assumed to cost
as much as one of the request's own until observations differ, so that a group without a queue so
far gives a sensible forecast for its first one. An outlier changes the rates little; when the group
itself has become slower, all errors are large, and the rates follow.

Before `MIN_OBSERVATIONS` requests there is no forecast.
"""

from math import inf
from typing import NamedTuple

WINDOW = 20
"""Requests after which one counts for a third (1/e) of a new one. With noise of 30 % in every
wait, forecasts err by 16 % as with 40, and follow a group that became three times slower twice as
fast."""
MIN_OBSERVATIONS = 8

_KEPT = 1 - 1 / WINDOW
_MIN_WAIT_S = 1e-3
"""Differences of less than a millisecond are noise: errors are not relative to less."""
_TIE = 0.02
"""Weight of the assumption that a queued token costs as much as one of the request's own."""
_DAMPING = 1e-4
"""Avoids a division by 0 for a term that never varied."""
_SWEEPS = 4
_OUTLIER = 3.0
"""An error counts for at most this many times the recent errors."""
_MIN_SPREAD = 0.05
_SPREAD_RATE = 0.1

_OWN, _AHEAD, _BESIDE, _FIXED = range(4)
_ORDER = (_OWN, _AHEAD, _BESIDE, _FIXED)


class Pace(NamedTuple):
    """Seconds for each part of a wait."""

    own_s: float
    """Per missing token."""
    ahead_s: float
    """Per queued token."""
    beside_s: float
    """Per sequence."""
    fixed_s: float

    def wait_s(self, *, num_missing: int, num_queued: int, num_sequences: int) -> float:
        """The seconds until the first token of a request sent now."""
        return (
            self.own_s * num_missing
            + self.ahead_s * num_queued
            + self.beside_s * num_sequences
            + self.fixed_s
        )


class PaceFit:
    """Learns one group's `Pace`. Takes the same memory however much it has seen."""

    __slots__ = ("_moments", "_num_observed", "_rates", "_spread", "_targets", "pace")

    def __init__(self) -> None:
        self.pace: Pace | None = None
        """None until enough was seen. Never changed, but replaced."""
        self._num_observed = 0
        self._moments = [[0.0] * 4 for _ in _ORDER]
        self._targets = [0.0] * 4
        self._rates = [0.0] * 4
        self._spread = 1 / _OUTLIER

    def observe(
        self, *, num_missing: int, num_queued: int, num_sequences: int, waited_s: float
    ) -> None:
        """A request saw its first token after ``waited_s``; the numbers are those of `Pace`."""
        if not 0 <= waited_s < inf:
            return  # A clock that went back teaches nothing.
        seen = (float(num_missing), float(num_queued), float(num_sequences), 1.0)
        target_s, scale_s = waited_s, max(waited_s, _MIN_WAIT_S)
        if self.pace is not None:
            expected_s = sum(rate * x for rate, x in zip(self._rates, seen, strict=True))
            scale_s = max(expected_s, _MIN_WAIT_S)
            target_s = expected_s + scale_s * self._bounded((waited_s - expected_s) / scale_s)
        self._num_observed += 1
        self._take(seen, target_s, weight=1 / scale_s**2)
        for _ in range(_SWEEPS):
            self._improve()
        if self._num_observed >= MIN_OBSERVATIONS:
            self.pace = Pace(*self._rates)

    def _bounded(self, error: float) -> float:
        """The relative error, bounded; also updates the recent size of errors."""
        limit = _OUTLIER * max(self._spread, _MIN_SPREAD)
        error = min(max(error, -limit), limit)
        self._spread += _SPREAD_RATE * (abs(error) - self._spread)
        return error

    def _take(self, seen: tuple[float, ...], target_s: float, *, weight: float) -> None:
        for i, row in enumerate(self._moments):
            weighted = weight * seen[i]
            self._targets[i] = _KEPT * self._targets[i] + weighted * target_s
            for j in _ORDER:
                row[j] = _KEPT * row[j] + weighted * seen[j]

    def _improve(self) -> None:
        """One sweep of coordinate descent from the current rates, each kept at 0 or above.

        Tokens come first: time that could belong to tokens or to the fixed part goes to tokens.
        """
        rates, moments = self._rates, self._moments
        tie = _TIE * moments[_OWN][_OWN]
        for i in _ORDER:
            row = moments[i]
            weight, target = row[i] * (1 + _DAMPING), self._targets[i]
            for j in _ORDER:
                if j != i:
                    target -= row[j] * rates[j]
            if i in (_OWN, _AHEAD):
                weight += tie
                target += tie * rates[_AHEAD if i == _OWN else _OWN]
            rates[i] = max(target / weight, 0.0) if weight > 0 else 0.0
