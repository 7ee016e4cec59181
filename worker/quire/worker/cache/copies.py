"""Copies of blocks that wait for a step, and what may happen once the step that makes them has run.

All copies go with the next step that is submitted, in the order in which they were asked for.
"""

from collections import deque
from collections.abc import Callable
from typing import NewType

import numpy as np

from quire.worker.api.arrays import Ints
from quire.worker.cache.blocks import BlockId

Slot = NewType("Slot", int)
"""A block's place in host memory."""

_POOL, _HOST = 0, 1


class Copies:
    """Used from the engine's thread."""

    def __init__(self) -> None:
        self._copies: list[tuple[tuple[int, int], tuple[int, int]]] = []
        # For each block, the last of the newest copies into the KV cache, which are made at once.
        self._into: dict[BlockId, int] = {}
        self._then: list[Callable[[], None]] = []
        self._under_way: deque[list[Callable[[], None]]] = deque()

    def __len__(self) -> int:
        """Copies that no step has."""
        return len(self._copies)

    def out(self, block_id: BlockId, slot: Slot) -> None:
        """Copies a block of the KV cache to host memory."""
        self._copies.append(((_POOL, block_id), (_HOST, slot)))
        self._into.clear()

    def into(self, slot: Slot, block_id: BlockId) -> None:
        """Copies a block in host memory to the KV cache."""
        copy = ((_HOST, slot), (_POOL, block_id))
        place = self._into.get(block_id)
        if place is not None:  # Whom that one was for has let go of the block.
            self._copies[place] = copy
            return
        self._into[block_id] = len(self._copies)
        self._copies.append(copy)

    def then(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once the step that makes all copies asked for so far has run."""
        self._then.append(callback)

    def submitted(self) -> Ints | None:
        """A step is submitted, which has to make the copies that this returns: ``[X, 2, 2]``."""
        copies, self._copies = self._copies, []
        self._into.clear()
        callbacks, self._then = self._then, []
        self._under_way.append(callbacks)
        return np.array(copies, dtype=np.int32) if copies else None

    def finished(self) -> None:
        """The oldest step under way has run."""
        for callback in self._under_way.popleft():
            callback()
