"""Limits on the bytes and on the requests that a gateway has at a time."""

import asyncio
from collections import deque
from collections.abc import Callable

from quire.cluster.errors import Overloaded


class Hold:
    """Bytes or places that were taken. They are given back once, by `release` or at the end of
    ``with``."""

    def __init__(self, give_back: Callable[[], None], num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Inflight:
    """Counts requests in progress; ``num`` is at most ``limit``."""

    def __init__(self, limit: int, message: str, *, refused: Callable[[], object]) -> None:
        """``message`` is that of a refusal, with fields for ``num``, ``more`` and ``limit``.
        ``refused`` is called before each refusal."""
        self.num = 0
        self._limit = limit
        self._message = message
        self._refused = refused

    def enter(self, more: int = 1) -> None:
        """Counts ``more`` requests until `leave`. Raises Overloaded: there would be too many."""
        if self.num + more > self._limit:
            self._refused()
            message = self._message.format(num=self.num, more=more, limit=self._limit)
            raise Overloaded(message, reason="inflight", retry_after_s=1.0)
        self.num += more

    def leave(self, number: int = 1) -> None:
        self.num -= number

    def missing(self, more: int) -> int:
        """How many requests would have to leave before ``more`` can enter."""
        return max(0, self.num + more - self._limit)

    def entered(self, more: int = 1) -> Hold:
        """Counts ``more`` requests until the hold is released. Raises as `enter`."""
        self.enter(more)
        return Hold(lambda: self.leave(more))


class ByteBudget:
    """A budget of bytes: ``held <= limit``, and waiting requests are served in order of arrival.

    Belongs to one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.waiting = 0
        """Sum of the bytes that are waited for."""
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> Hold:
        """Waits until ``num_bytes`` are free and takes them; more than ``limit`` takes all."""
        wanted = min(num_bytes, self.limit)
        hold = self.take_now(wanted)
        return await self._wait(wanted) if hold is None else hold

    def take_now(self, num_bytes: int) -> Hold | None:
        """Takes bytes as `take` does; ``None`` if it would have to wait."""
        wanted = min(num_bytes, self.limit)
        if self._queue or self.held + wanted > self.limit:
            return None
        self.held += wanted
        return Hold(lambda: self._give_back(wanted), wanted)

    async def _wait(self, wanted: int) -> Hold:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (wanted, future)
        self._queue.append(entry)
        self.waiting += wanted
        try:
            await future  # `_serve` has counted the bytes as held.
        except asyncio.CancelledError:
            if not future.cancelled():
                self._give_back(wanted)
            elif entry in self._queue:
                self._queue.remove(entry)
                # A smaller request after this one may fit now.
                self._serve()
            raise
        finally:
            self.waiting -= wanted
        return Hold(lambda: self._give_back(wanted), wanted)

    def _give_back(self, num_bytes: int) -> None:
        self.held -= num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._queue and self.held + self._queue[0][0] <= self.limit:
            wanted, future = self._queue.popleft()
            if future.cancelled():
                continue
            self.held += wanted
            future.set_result(None)
