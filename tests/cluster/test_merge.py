import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from quire.cluster.serving.merge import merge

pytestmark = pytest.mark.anyio


class Source:
    """A stream of numbers that tells whether it was closed."""

    def __init__(self, *numbers: int, error: Exception | None = None, hangs: bool = False) -> None:
        self.is_closed = False
        self._numbers = numbers
        self._error = error
        self._hangs = hangs

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for number in self._numbers:
                await asyncio.sleep(0)
                yield number
            if self._error is not None:
                raise self._error
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_every_item_comes_once_and_in_its_streams_order(num_streams: int) -> None:
    sources = [Source(*range(10 * start, 10 * start + 5)) for start in range(num_streams)]
    found = [item async for item in merge([source.stream() for source in sources])]
    assert sorted(found) == [10 * start + i for start in range(num_streams) for i in range(5)]
    for start in range(num_streams):
        assert [item for item in found if item // 10 == start] == sorted(
            item for item in found if item // 10 == start
        )


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_an_error_closes_all_streams(num_streams: int) -> None:
    sources = [Source(1, hangs=True) for _ in range(num_streams - 1)]
    sources.append(Source(2, error=ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([source.stream() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_closing_early_closes_all_streams(num_streams: int) -> None:
    sources = [Source(1, 2, hangs=True) for _ in range(num_streams)]
    async with aclosing(merge([source.stream() for source in sources])) as merged:
        await anext(merged)
    assert sources[0].is_closed
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_cancelling_the_reader_closes_all_streams(num_streams: int) -> None:
    sources = [Source(hangs=True) for _ in range(num_streams)]
    merged = merge([source.stream() for source in sources])
    reader = asyncio.ensure_future(anext(merged))
    await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.wait([reader])
    assert all(source.is_closed for source in sources)
