"""Requests that parts prepare before they are queued, one part after another. Other requests run
meanwhile."""

from collections.abc import Sequence as Items

from quire.worker.engine.part import Part
from quire.worker.engine.sequence import Sequence
from quire.worker.request.errors import QuireError


class Preparing:
    """Used from the engine's thread."""

    def __init__(self, parts: Items[Part]) -> None:
        self._parts = parts
        self._place: dict[Sequence, int] = {}
        """By sequence: the index of the part that it waits for."""

    def __len__(self) -> int:
        return len(self._place)

    @property
    def has_work(self) -> bool:
        """Whether `take` would do anything."""
        return any(part.is_preparing for part in self._parts)

    def add(self, seq: Sequence) -> bool:
        """Returns whether ``seq`` may be queued at once. If not, `take` returns it when it may."""
        return self._go_on(seq, 0)

    def remove(self, seq: Sequence) -> bool:
        """Removes an aborted ``seq``. Returns whether it was here. `Part.forget` must follow."""
        return self._place.pop(seq, None) is not None

    def take(
        self, *, is_idle: bool, num_pending_tokens: int
    ) -> tuple[list[Sequence], list[tuple[Sequence, QuireError]]]:
        """Returns the sequences that may be queued now, and those that are refused with their
        errors. If the engine is idle, waits briefly for the first. ``num_pending_tokens`` is the
        number of tokens that queued and running prompts have yet to compute."""
        ready: list[Sequence] = []
        refused: list[tuple[Sequence, QuireError]] = []
        for index, part in enumerate(self._parts):
            if not part.is_preparing:
                continue
            # A part may only wait where all sequences wait for it.
            may_wait = is_idle and all(place == index for place in self._place.values())
            for seq, error in part.let_in(may_wait=may_wait, num_pending_tokens=num_pending_tokens):
                self._place.pop(seq, None)
                if error is not None:
                    refused.append((seq, error))
                elif self._go_on(seq, index + 1):
                    ready.append(seq)
        return ready, refused

    def _go_on(self, seq: Sequence, begin: int) -> bool:
        for index in range(begin, len(self._parts)):
            if not self._parts[index].admit(seq):
                self._place[seq] = index
                return False
        return True
