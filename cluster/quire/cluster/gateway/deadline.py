"""Deadlines of streams: what is not over in time is closed, and so ends whatever it was doing."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from math import inf
from typing import TypeVar

from quire.cluster.errors import DeadlineExceeded

T = TypeVar("T")


async def until(
    deadline_s: float, items: AsyncGenerator[T, None], *, clock: Callable[[], float]
) -> AsyncGenerator[T, None]:
    """Yields ``items`` until ``clock`` says ``deadline_s``; closes them before it is left.

    Raises:
        DeadlineExceeded: There would have been more.
    """
    async with aclosing(items):
        while True:
            timeout_s = None if deadline_s == inf else deadline_s - clock()
            try:
                # Not around the loop: whoever takes the next item may be another task.
                async with asyncio.timeout(timeout_s):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise late() from None
            yield item


def late() -> DeadlineExceeded:
    """What to raise for a request whose time is over."""
    return DeadlineExceeded("the request's deadline passed before its end: give it more time")
