"""Restarts and logs background tasks that fail."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from quire.router.failure_log import FailureLog

_log = logging.getLogger(__name__)


async def keep_going(
    work: Callable[[], Awaitable[None]], *, name: str, pause_s: float = 1.0
) -> None:
    """Runs ``work`` until it returns, and again ``pause_s`` after each exception.

    Exceptions are logged with their stack, each kind once a minute. Ends when cancelled, even if
    ``work`` raises another exception in place of CancelledError.
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
    """Raises CancelledError if the current task was cancelled. For handlers of other exceptions: a
    cancelled gRPC call whose status arrives at the same moment raises that status instead."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
