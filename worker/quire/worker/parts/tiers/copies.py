"""Block copies to be made by the next step, and callbacks for when that step has run.

The next submitted step makes all copies, in the order in which they were requested.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from quire.worker.cache.block_pool import BlockId
from quire.worker.engine.part import Slot
from quire.worker.request.arrays import Ints

_POOL, _HOST = 0, 1


class Copies:
    """The pending copies. Used from the engine's thread."""

    def __init__(self) -> None:
        self._copies: list[tuple[tuple[int, int], tuple[int, int]]] = []
        # By target: index of the copy into the KV cache, for the copies since the last `out`.
        # These are made together.
        self._into: dict[BlockId, int] = {}
        self._then: list[Callable[[], None]] = []
        self._under_way: deque[list[Callable[[], None]]] = deque()

    def __len__(self) -> int:
        """Number of copies that no submitted step makes."""
        return len(self._copies)

    def out(self, block_id: BlockId, slot: Slot) -> None:
        """Adds a copy of a block of the KV cache to host memory."""
        self._copies.append(((_POOL, block_id), (_HOST, slot)))
        self._into.clear()

    def into(self, slot: Slot, block_id: BlockId) -> None:
        """Adds a copy of a block in host memory to the KV cache."""
        copy = ((_HOST, slot), (_POOL, block_id))
        place = self._into.get(block_id)
        if place is not None:  # The holder that the earlier copy was for has released the block.
            self._copies[place] = copy
            return
        self._into[block_id] = len(self._copies)
        self._copies.append(copy)

    def then(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once the step that makes all copies requested so far has run."""
        self._then.append(callback)

    def submitted(self) -> Ints | None:
        """Called when a step is submitted. Returns the copies that it must make: ``[X, 2, 2]``."""
        copies, self._copies = self._copies, []
        self._into.clear()
        callbacks, self._then = self._then, []
        self._under_way.append(callbacks)
        return np.array(copies, dtype=np.int32) if copies else None

    def finished(self) -> None:
        """Called when the oldest step under way has run. Runs its callbacks."""
        for callback in self._under_way.popleft():
            callback()
