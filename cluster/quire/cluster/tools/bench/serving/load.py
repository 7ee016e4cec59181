"""Sends requests at their times, regardless of earlier ones, and measures its own delays.

The clock, the sleep and the transport are arguments: the same code runs in virtual time.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from quire.cluster.tools.bench.serving.answer import Answer, RequestFailed

_WATCH_EVERY_S = 0.01
_MOST_LAGS = 1_000_000


class Transport(Protocol):
    """Sends requests to a server."""

    def stream(self, body: bytes) -> AsyncGenerator[bytes]:
        """Sends a request and yields the bytes of its answer as they arrive.

        Raises:
            RequestFailed: There is no answer, or it broke off.
        """


@dataclass(kw_only=True)
class Progress:
    """The progress of a load."""

    num_requests: int
    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0

    @property
    def num_under_way(self) -> int:
        return self.num_sent - self.num_done


@dataclass(frozen=True, kw_only=True)
class Load:
    """The result of a load. Times are in seconds."""

    answers: list[Answer]
    """One answer for each request, in the order of the requests."""
    begin_s: float
    duration_s: float
    """From the start to the end of the last answer."""
    lags_s: Sequence[float] = field(default_factory=list)
    """How late the client's event loop was at each check; the client's own times are off by as
    much."""

    @property
    def late_s(self) -> list[float]:
        """How late the client started on each request."""
        return [answer.started_s - answer.due_s for answer in self.answers]

    @property
    def failures(self) -> Counter[str]:
        """Number of failures of each kind."""
        return Counter(answer.failure.kind for answer in self.answers if answer.failure)


async def run(
    bodies: Sequence[bytes],
    at_s: Sequence[float],
    transport: Transport,
    *,
    max_concurrency: int | None,
    keeps_text: bool,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Load:
    """Sends each body at its time from now. Server failures are recorded, never raised."""
    begin_s = clock()
    answers = [Answer(due_s=begin_s + at, keeps_text=keeps_text) for at in at_s]
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    progress = Progress(num_requests=len(bodies))
    lags = array("d")

    async def one(body: bytes, answer: Answer) -> None:
        answer.started_s = clock()
        async with slots:
            progress.num_sent += 1
            await ask(body, answer, transport, clock=clock)
        progress.num_done += 1
        progress.num_failed += not answer.is_complete

    async def watch() -> None:
        while True:
            due_s = clock() + _WATCH_EVERY_S
            await sleep(_WATCH_EVERY_S)
            if len(lags) < _MOST_LAGS:
                lags.append(max(clock() - due_s, 0.0))
            on_progress(progress)

    watching = asyncio.create_task(watch())
    try:
        async with asyncio.TaskGroup() as tasks:
            for body, answer in zip(bodies, answers, strict=True):
                while (wait_s := answer.due_s - clock()) > 0:
                    await sleep(wait_s)
                tasks.create_task(one(body, answer))
        duration_s = clock() - begin_s
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return Load(answers=answers, begin_s=begin_s, duration_s=duration_s, lags_s=lags)


async def ask(
    body: bytes, answer: Answer, transport: Transport, *, clock: Callable[[], float]
) -> None:
    """Sends one request now, and fills in ``answer`` until it ends or fails."""
    answer.sent_s = clock()
    try:
        async with aclosing(transport.stream(body)) as stream:
            async for data in stream:
                answer.feed(data, clock())
        answer.close()
    except RequestFailed as failure:
        # A copy has no traceback, which would keep all passed frames alive.
        answer.failure = RequestFailed(failure.kind, str(failure))
