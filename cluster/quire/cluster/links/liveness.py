"""Decides from a group's frames whether the group is still alive.

Liveness is checked every ``beat_s``, an eighth of the timeout. A pause of this process counts as
one missed check however long it was, because the group's frames then lie unread.
"""

from dataclasses import dataclass

_BEATS = 8
"""Checks within the silence timeout."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The reason why a stream to a group ended."""

    reason: str
    is_death: bool = False
    is_refutable: bool = True
    """Whether attaching again proves that the group is alive. It does not if the group hung, as it
    can be attached nevertheless."""


class Liveness:
    """Liveness of one group. The owner calls `beat` every ``beat_s``."""

    def __init__(self, *, silence_timeout_s: float, step_deadline_s: float) -> None:
        self.beat_s = silence_timeout_s / _BEATS
        self._silence_timeout_s = silence_timeout_s
        self._step_deadline_s = step_deadline_s
        self._is_heard = False
        self._step = self._last_step = 0
        self._num_silent = 0
        self._num_stalled = 0

    def frame(self, step: int) -> None:
        """Notes a frame, which the group sent after ``step`` steps."""
        self._is_heard = True
        self._step = step

    def beat(self, *, is_owed: bool) -> Disconnect | None:
        """Does one check; returns why the group is lost, or ``None``. ``is_owed``: whether the
        group should be producing tokens."""
        self._num_silent = 0 if self._is_heard else self._num_silent + 1
        is_stalled = is_owed and self._step == self._last_step
        self._num_stalled = self._num_stalled + 1 if is_stalled else 0
        self._is_heard, self._last_step = False, self._step
        if self._num_silent >= _BEATS:
            return Disconnect(f"no frame for {self._silence_timeout_s:g} s", is_death=True)
        if self._num_stalled * self.beat_s >= self._step_deadline_s:
            reason = f"no step for {self._step_deadline_s:g} s, with work to do"
            return Disconnect(reason, is_death=True, is_refutable=False)
        return None
