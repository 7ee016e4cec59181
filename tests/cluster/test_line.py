"""The socket by which `quire serve` reaches gateways without Ray; gateways are coroutines here."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cluster.deploy.line import PATH, Line, drain_when_told

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    # Socket paths under pytest's own folder are too long.
    with tempfile.TemporaryDirectory(prefix="q") as folder, Line(Path(folder) / "line") as line:
        monkeypatch.setenv(PATH, str(line.path))
        yield line


class Gateway:
    def __init__(self) -> None:
        self.is_told, self.may_end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(drain_when_told(self._drain))

    async def _drain(self) -> None:
        self.is_told.set()
        await self.may_end.wait()


async def test_every_gateway_drains_when_told_and_is_waited_for(line: Line) -> None:
    gateways = [Gateway(), Gateway()]
    await asyncio.sleep(0.1)
    assert not any(gateway.is_told.is_set() for gateway in gateways)
    drained = asyncio.create_task(asyncio.to_thread(line.drain, timeout_s=500))
    for gateway in gateways:
        await gateway.is_told.wait()
    gateways[0].may_end.set()
    await gateways[0].task
    assert not drained.done()
    gateways[1].may_end.set()
    assert await drained


async def test_a_gateway_that_does_not_end_is_not_waited_for_without_end(line: Line) -> None:
    gateway = Gateway()
    await asyncio.sleep(0.1)
    assert not await asyncio.to_thread(line.drain, timeout_s=0.5)
    gateway.task.cancel()


async def test_a_gateway_that_is_gone_has_no_streams(line: Line) -> None:
    gateway = Gateway()
    await asyncio.sleep(0.1)
    gateway.task.cancel()
    await asyncio.gather(gateway.task, return_exceptions=True)
    assert await asyncio.to_thread(line.drain, timeout_s=500)
    assert not gateway.is_told.is_set()


async def test_on_a_cluster_of_others_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PATH, raising=False)
    await Gateway().task
