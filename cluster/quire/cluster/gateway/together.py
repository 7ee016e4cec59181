"""Runs several coroutines that feed one consumer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(
    sources: Sequence[Callable[[Callable[[T], Awaitable[None]]], Coroutine[Any, Any, None]]],
    take: Callable[[T], Awaitable[None]],
) -> None:
    """Runs all ``sources`` until they have ended. Each hands its items to ``take``, which gets one
    at a time.

    The first exception in a source cancels the others and is raised here. All have ended when this
    returns or raises, including when it is cancelled.
    """
    if len(sources) == 1:
        await sources[0](take)
        return
    turn = asyncio.Lock()

    async def in_turn(item: T) -> None:
        async with turn:
            await take(item)

    tasks = [asyncio.ensure_future(source(in_turn)) for source in sources]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
