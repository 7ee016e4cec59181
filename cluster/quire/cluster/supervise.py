"""Keeps work that nobody waits for from dying unseen."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from quire.router.failure_log import FailureLog

_log = logging.getLogger(__name__)


async def keep_going(
    work: Callable[[], Awaitable[None]], *, name: str, pause_s: float = 1.0
) -> None:
    """Runs ``work`` until it returns, and again ``pause_s`` after it raised.

    What it raised is logged with its stack, each kind once in a minute. Ends when cancelled, also
    where ``work`` answers that with another exception.
    """
    failures = FailureLog(_log)
    while True:
        try:
            return await work()
        except Exception as error:
            failures.report(error, name)
            end_if_cancelled()
        await asyncio.sleep(pause_s)


def end_if_cancelled() -> None:
    """Raises CancelledError in a task that was cancelled, where what it waited for answered that
    with another exception. A call of gRPC whose status comes at the same moment raises that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
