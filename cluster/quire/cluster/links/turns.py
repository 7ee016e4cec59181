"""Keeps each turn of a gateway's event loop short under any load.

A turn runs all callbacks that are ready. If every stream of every group has a frame, the turn is
long. gRPC's asyncio server needs four turns to accept a call, one call at a time, so requests would
queue unseen in front of admission while the loop is busy.

So only some streams continue in each turn: as many as take about a millisecond. The waiting ones
lose nothing: their tokens go out in fewer and larger chunks, which cost less.
"""

import asyncio
from collections import deque
from collections.abc import Callable

_TURN_S = 1e-3
"""Each turn costs something itself, as much as one or two chunks' way through the gateway."""
_FEWEST, _MOST = 2, 32


class Turns:
    """Runs callbacks in the order in which they come, some in each turn of the event loop."""

    def __init__(self, *, most: int = _MOST, clock: Callable[[], float] | None = None) -> None:
        """``clock``: the event loop's, in seconds, if absent."""
        self._most = most
        self._clock = clock
        self._num = _FEWEST
        self._began_s: float | None = None  # The last turn, if this one follows it at once.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def soon(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called in a later turn. It must not raise."""
        self._waiting.append(callback)
        self._come_back()

    def _turn(self) -> None:
        self._is_due = False
        now_s = (self._clock or asyncio.get_running_loop().time)()
        if self._began_s is not None:
            # What the callbacks woke ran between the two.
            is_long = now_s - self._began_s >= _TURN_S
            self._num = max(_FEWEST, self._num // 2) if is_long else min(self._most, 2 * self._num)
        for _ in range(min(self._num, len(self._waiting))):
            self._waiting.popleft()()
        self._began_s = now_s if self._waiting else None
        self._come_back()

    def _come_back(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)
