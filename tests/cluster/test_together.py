import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.cluster.gateway.fan_out import together

pytestmark = pytest.mark.anyio


class Source:
    """A stream of numbers that tells whether it has ended."""

    def __init__(self, *numbers: int, error: Exception | None = None, hangs: bool = False) -> None:
        self.has_ended = False
        self._numbers = numbers
        self._error = error
        self._hangs = hangs

    async def run(self, take: Callable[[int], Awaitable[object]]) -> None:
        try:
            for number in self._numbers:
                await asyncio.sleep(0)
                await take(number)
            if self._error is not None:
                raise self._error
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.has_ended = True


class Sink:
    def __init__(self) -> None:
        self.found: list[int] = []
        self._num_at_once = 0

    async def take(self, number: int) -> None:
        self._num_at_once += 1
        assert self._num_at_once == 1, "one at a time"
        await asyncio.sleep(0)
        self.found.append(number)
        self._num_at_once -= 1


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_every_item_comes_once_and_in_its_streams_order(num_streams: int) -> None:
    sources = [Source(*range(10 * start, 10 * start + 5)) for start in range(num_streams)]
    sink = Sink()
    await together([source.run for source in sources], sink.take)
    found = sink.found
    assert sorted(found) == [10 * start + i for start in range(num_streams) for i in range(5)]
    for start in range(num_streams):
        assert [item for item in found if item // 10 == start] == sorted(
            item for item in found if item // 10 == start
        )


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_an_error_ends_all_streams(num_streams: int) -> None:
    sources = [Source(1, hangs=True) for _ in range(num_streams - 1)]
    sources.append(Source(2, error=ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        await together([source.run for source in sources], Sink().take)
    assert all(source.has_ended for source in sources)


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_an_error_of_the_sink_ends_all_streams(num_streams: int) -> None:
    async def take(number: int) -> None:
        raise ValueError("full")

    sources = [Source(1, 2, hangs=True) for _ in range(num_streams)]
    with pytest.raises(ValueError, match="full"):
        await together([source.run for source in sources], take)
    assert all(source.has_ended for source in sources)


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_cancelling_ends_all_streams(num_streams: int) -> None:
    sources = [Source(hangs=True) for _ in range(num_streams)]
    running = asyncio.ensure_future(together([source.run for source in sources], Sink().take))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert all(source.has_ended for source in sources)
