"""Several asynchronous streams as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields what the streams yield, as it comes.

    The first exception of one closes the others and is raised here. Closing this generator closes
    them all before it returns, whatever they were waiting for. At most one item of each stream
    waits to be taken.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # In the streams' own order, so that equal inputs give equal outputs.
            for future in [future for future in waiting if future in done]:
                stream = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
