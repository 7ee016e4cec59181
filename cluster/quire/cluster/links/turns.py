"""Keeps each turn of a gateway's event loop short, however much is there to do.

A turn runs all that is ready. Where that is a frame for every stream of every group, the turn is
long, and what needs several turns waits for as many long ones: gRPC's asyncio server takes four to
accept a call, and one call at a time, so that requests would queue in front of admission, unseen,
for as long as the loop is busy. So streams wait for their turn: a few go on in each.

Those that wait lose nothing: what comes meanwhile goes out with what they have, in fewer and larger
chunks, which cost less.
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
