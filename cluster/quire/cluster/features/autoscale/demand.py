"""Counts the requests that wait at a gateway because no group can take them, for autoscaling."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Demand:
    """Counts the requests that wait at one gateway.

    Belongs to one event loop. Code that makes a request wait for a group does so inside `waiting`.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        """Prompt tokens of these requests; one for a prompt that cannot be counted yet."""
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def waiting(self, num_tokens: int) -> Iterator[None]:
        """Counts a request with ``num_tokens`` prompt tokens while the block runs."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        self._some.set()
        self._none.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= num_tokens
            if not self.num_requests:
                self._some.clear()
                self._none.set()

    async def wait_for_some(self) -> None:
        """Returns once at least one request waits."""
        await self._some.wait()

    async def wait_while_some(self, *, until: asyncio.Future[None]) -> None:
        """Returns once no request waits any more, or when ``until`` is done."""
        none = asyncio.ensure_future(self._none.wait())
        either: set[asyncio.Future[Any]] = {none, until}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            none.cancel()
