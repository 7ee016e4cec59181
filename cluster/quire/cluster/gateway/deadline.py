"""The layer that ends a request at its deadline: work that passes it is cancelled."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import TracebackType

from quire.cluster.errors import DeadlineExceeded
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.work import Run, Take, Work


class MeetDeadline:
    """Runs a request until its deadline. The client gets each chunk whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    async def __call__(self, work: Work, take: Take, run: Run[Work]) -> None:
        """Raises DeadlineExceeded: the deadline has passed, and the completions were aborted."""
        async with Deadline(work.first.deadline_s, clock=self._clock) as deadline:

            async def pass_on(chunk: Chunk) -> None:
                with deadline.paused():
                    await take(chunk)

            await run(work, pass_on if deadline.is_set else take)


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
