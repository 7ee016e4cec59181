"""Keeps each turn of a gateway's event loop short under any load.

A turn runs all callbacks that are ready. If every stream of every group has a frame, the turn is
long. gRPC's asyncio server needs four turns to accept a call, one call at a time, so requests would
queue unseen in front of admission while the loop is busy.

So only a few streams continue in each turn. The waiting ones lose nothing: their tokens go out in
fewer and larger chunks, which cost less.
"""

import asyncio
from collections import deque
from collections.abc import Callable

_PER_TURN = 2
"""Each turn costs something itself, and less than a chunk's way through the gateway."""


class Turns:
    """Runs callbacks in the order in which they come, a few in each turn of the event loop."""

    def __init__(self, *, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def soon(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called in a later turn. It must not raise."""
        self._waiting.append(callback)
        self._come_back()

    def _turn(self) -> None:
        self._is_due = False
        for _ in range(min(self._per_turn, len(self._waiting))):
            self._waiting.popleft()()
        self._come_back()

    def _come_back(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)
