"""The outcome, for metrics and explanations, of a completion that was closed from outside.

A completion cannot see who closed it: its client, its deadline, or another failed completion of the
same request. All three look alike from inside.
"""

from dataclasses import dataclass
from math import inf

from quire.worker.api.errors import QuireError

# A client's own clock ends its call too, and often first: gRPC sends the time that is left rounded
# up, by a hundredth at most, and what it sends is some milliseconds under way.
_ROUNDING = 0.01
_ON_THE_WAY_S = 0.02


@dataclass(slots=True, kw_only=True)
class Ending:
    """State shared by the completions of one client's request, because they end together."""

    arrival_s: float = 0.0
    deadline_s: float = inf
    """Both on the completions' clock."""
    is_failed: bool = False
    """One of them has failed, and so will all."""

    def of_closed(self, *, now_s: float, lost: QuireError | None) -> tuple[str, str]:
        """The outcome of one that is closed now, and more about it, which may be nothing.

        ``lost`` is what became of its last attempt, where it waits for the next.
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
