"""Estimates a group's progress in its present step, from the arrival times of its frames.

The length of a step is predicted from earlier steps and its prompt tokens:

    length = fixed + per_token * tokens

fitted by least squares to about the last `WINDOW` steps, neither part negative. A step computes the
tokens queued at its beginning, but at most as many as any step before. A step takes a hundredth of
a second to several tenths, so on average half of it is over when the next request arrives, and much
more in one group than in another.

Nothing is known before `MIN_STEPS` steps were seen, nor of the step that an idle group begins: its
beginning brought no frame, and a heartbeat may come during it.
"""

WINDOW = 30
"""Steps after which one counts for a third (1/e) of a new one."""
MIN_STEPS = 8

_KEPT = 1 - 1 / WINDOW


class StepClock:
    """One group's. Takes the same memory however much it has seen."""

    __slots__ = (
        "_is_known",
        "_moments",
        "_most",
        "_num_seen",
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
        self._num_seen = 0
        self._moments = (0.0, 0.0, 0.0, 0.0, 0.0)  # Of 1, x, y, x * x, x * y.

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
            self._learn(self.num_tokens, (at_s - self.began_s) / num_steps)
        self._step = step
        self._is_known = not is_idle
        self._queued = num_queued
        self.began_s = at_s
        self.length_s = 0.0 if is_idle else self._expected_s()

    def _learn(self, x: float, y: float) -> None:
        """From a step with ``x`` tokens that took ``y`` seconds."""
        if y <= 0:
            return  # A clock that went back teaches nothing.
        n, sum_x, sum_y, xx, xy = [_KEPT * moment for moment in self._moments]
        self._moments = n + 1, sum_x + x, sum_y + y, xx + x * x, xy + x * y
        self._num_seen += 1

    def _expected_s(self) -> float:
        if self._num_seen < MIN_STEPS:
            return 0.0
        n, x, y, xx, xy = self._moments
        spread = n * xx - x * x
        slope = max((n * xy - x * y) / spread, 0.0) if spread > 1e-6 * n * xx else 0.0
        fixed = (y - slope * x) / n
        if fixed < 0:
            # Both parts at 0 or above: the line goes through the origin.
            fixed, slope = 0.0, xy / xx
        return fixed + slope * self.num_tokens
