"""Tells why a completion was cancelled, for metrics and explanations.

A completion is cancelled by its client, by its deadline, or because another completion of the same
request failed. It sees the same CancelledError in all three cases.
"""

from dataclasses import dataclass
from math import inf

from quire.worker.api.errors import QuireError

# A client ends its call at the deadline too, and often first: gRPC sends the remaining time rounded
# up, by a hundredth at most, and the message takes some milliseconds to arrive.
_ROUNDING = 0.01
_ON_THE_WAY_S = 0.02


@dataclass(slots=True, kw_only=True)
class Ending:
    """State shared by the completions of one client's request, because they end together."""

    arrival_s: float = 0.0
    deadline_s: float = inf
    """Arrival and deadline of the request, on the completions' clock."""
    is_failed: bool = False
    """Whether one of the completions has failed, which cancels the others."""

    def of_closed(self, *, now_s: float, lost: QuireError | None) -> tuple[str, str]:
        """The outcome of a completion that is cancelled now, and a detail, which may be empty.

        ``lost`` is the error of its last attempt, if it waits for the next one.
        """
        waiting = f"while it waited for another group ({lost})" if lost else ""
        if self.is_failed:
            return "cancelled", "another completion of the request failed"
        if now_s >= self._late_s:
            return "deadline", f"passed {waiting or 'before the end'}"
        return "cancelled", waiting

    @property
    def _late_s(self) -> float:
        if self.deadline_s == inf:
            return inf
        return self.deadline_s - _ROUNDING * (self.deadline_s - self.arrival_s) - _ON_THE_WAY_S
