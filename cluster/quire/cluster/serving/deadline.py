"""Deadlines of streams: a stream that exceeds its deadline is closed, which aborts its work."""

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
    """Yields ``items`` until ``clock`` reaches ``deadline_s``; closes them before it returns.

    Raises:
        DeadlineExceeded: There would have been more.
    """
    async with aclosing(items):
        while True:
            timeout_s = None if deadline_s == inf else deadline_s - clock()
            try:
                # Not around the loop: another task may take the next item.
                async with asyncio.timeout(timeout_s):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise late() from None
            yield item


def late() -> DeadlineExceeded:
    """The error for a request whose deadline has passed."""
    return DeadlineExceeded("the request's deadline passed before its end: give it more time")
