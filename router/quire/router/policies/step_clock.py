"""Estimates a group's progress in its present step, from the arrival times of its frames.

The length of a step is predicted from its prompt tokens by a `Line` through earlier steps. A step
computes the tokens queued at its beginning, but at most as many as any step before. A step takes a
hundredth of a second to several tenths, so on average half of it is over when the next request
arrives, and much more in one group than in another.

Nothing is known before `MIN_OBSERVATIONS` steps were seen, nor of the step that an idle group
begins: its beginning brought no frame, and a heartbeat may come during it.
"""

from quire.router.policies.line import Line

_WINDOW = 30


class StepClock:
    """One group's. Takes the same memory however much it has seen."""

    __slots__ = (
        "_is_known",
        "_line",
        "_most",
        "_queued",
        "_step",
        "began_s",
        "length_s",
    )

    def __init__(self) -> None:
        self.began_s = 0.0
        """When the last frame of a new step came: about the beginning of the present one."""
        self.length_s = 0.0
        """How long the present one is expected to take; 0 where nothing is known."""
        self._most = 0  # Prompt tokens by which a step has shortened the queue.
        self._step: int | None = None  # Steps that have ended; None before the first frame.
        self._is_known = False  # Whether the present one began when `began_s` says.
        self._queued = 0
        self._line = Line(window=_WINDOW)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the present step computes."""
        return min(self._queued, self._most)

    def frame(self, *, step: int, at_s: float, num_queued: int, is_idle: bool) -> None:
        """A frame came: ``step`` steps have ended, ``num_queued`` prompt tokens are left.

        A frame of no new step, such as a heartbeat, says nothing new, and of several steps at once
        nothing is learned where they had prompts to compute: it is not known how many each.
        """
        num_steps = 1 if self._step is None else step - self._step
        if num_steps <= 0:
            if is_idle:  # All was aborted.
                self._is_known, self.length_s = False, 0.0
            return
        if self._is_known and (num_steps == 1 or not self._queued):
            self._most = max(self._most, self._queued - num_queued)
            self._line.add(self.num_tokens, (at_s - self.began_s) / num_steps)
        self._step = step
        self._is_known = not is_idle
        self._queued = num_queued
        self.began_s = at_s
        self.length_s = 0.0 if is_idle else self._expected_s()

    def _expected_s(self) -> float:
        parts = self._line.parts
        return parts[0] + parts[1] * self.num_tokens if parts else 0.0
