"""Lets few calls begin in each turn of the event loop, so that a burst of them does not hold it.

To parse and check a call takes about a millisecond. The event loop runs all that is ready before it
looks at its sockets again, so 1,500 calls at once would keep tokens, the groups' frames and other
tenants' calls waiting for seconds. Calls that wait begin in turn of their tenants.
"""

import asyncio
from collections import deque

_PER_TURN = 2


class Turns:
    """The calls that are about to begin. Belongs to one event loop."""

    def __init__(self) -> None:
        self._left = _PER_TURN
        self._is_due = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # By tenant, next turn first.

    async def take(self, tenant: str) -> None:
        """Waits for a turn of the event loop in which a call of ``tenant`` may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        future = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        await future

    def _turn(self) -> None:
        self._left = _PER_TURN
        while self._left and self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            future = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # Its next turn comes after the others'.
            if not future.done():  # It was cancelled.
                future.set_result(None)
                self._left -= 1
        self._is_due = bool(self._waiting) or self._left < _PER_TURN
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)
