"""Deadlines of requests: work that passes its deadline is cancelled."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import TracebackType

from quire.cluster.errors import DeadlineExceeded


class Deadline:
    """Cancels the body of ``async with`` when ``clock`` reaches ``deadline_s``, and raises
    `DeadlineExceeded` instead."""

    def __init__(self, deadline_s: float, *, clock: Callable[[], float]) -> None:
        self.is_set = deadline_s < inf
        """Whether there is one."""
        self._deadline_s = deadline_s
        self._clock = clock

    async def __aenter__(self) -> "Deadline":
        remaining_s = self._deadline_s - self._clock() if self.is_set else None
        self._timeout = asyncio.timeout(remaining_s)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise late() from None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Delays a cancellation by the deadline until the end of the block."""
        if not self.is_set or self._timeout.expired():
            yield
            return
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            remaining_s = max(0.0, self._deadline_s - self._clock())
            self._timeout.reschedule(asyncio.get_running_loop().time() + remaining_s)


def late() -> DeadlineExceeded:
    """The error for a request whose deadline has passed."""
    return DeadlineExceeded("the request's deadline passed before its end: give it more time")
