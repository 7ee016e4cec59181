"""An HTTP server that stops: none of its clients finds its connection closed."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.http_listener import (
    FOREVER_S,
    GET,
    HEAD,
    STREAM,
    Client,
    Server,
    serving,
    status_of,
)

from quire.cluster.features.guard.leaving import HANDSHAKE_S

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives handshakes their normal time, which other tests set to 0."""
    monkeypatch.setattr("quire.cluster.features.guard.leaving.HANDSHAKE_S", HANDSHAKE_S)


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The event loops of gateways: uvloop is Ray's choice."""
    return "asyncio", {"use_uvloop": request.param}


def connection_header_of(head: bytes) -> str:
    (said,) = [
        line.split(b":")[1].strip().decode()
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"connection:")
    ]
    return said


@contextlib.asynccontextmanager
async def leaving(server: Server) -> AsyncIterator[None]:
    """Stops the listener during the block; at its end, the listener has stopped."""
    stopping = asyncio.create_task(server.listener.stop())
    await asyncio.sleep(0)
    yield
    await stopping


async def test_an_idle_connection_has_one_more_request_as_its_server_leaves() -> None:
    async with serving(drain_timeout_s=FOREVER_S) as server:
        client = await server.client(GET, sees=b"done")
        async with leaving(server):
            client.writer.write(GET)
            answer = await client.rest()
            assert status_of(answer) == 200
            assert connection_header_of(answer) == "close"


async def test_a_stream_that_promised_its_connection_keeps_it_as_its_server_leaves() -> None:
    """The client sends the next request while it reads the end of the answer."""
    async with serving(drain_timeout_s=FOREVER_S) as server:
        client = await server.client(STREAM, sees=b"begun")
        async with leaving(server):
            server.app.may_end.set()
            await client.reader.readuntil(b"done")
            client.writer.write(GET)
            answer = (await client.rest()).lstrip(b"\r\n0")
            assert status_of(answer) == 200
            assert connection_header_of(answer) == "close"


async def test_a_request_whose_answer_has_not_begun_is_told_that_its_server_leaves() -> None:
    async with serving(drain_timeout_s=FOREVER_S) as server:
        client = await server.client(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n" + HEAD + b"\r\n")
        await server.until_open(1)
        async with leaving(server):
            client.writer.write(b"hi")
            answer = await client.rest()
            assert status_of(answer) == 200
            assert connection_header_of(answer) == "close"


@pytest.mark.slow
async def test_connections_without_a_request_are_closed_as_their_server_leaves() -> None:
    async with serving(drain_timeout_s=FOREVER_S) as server:
        idle = await server.client(GET, sees=b"done\r\n0\r\n\r\n")
        silent = await server.client()
        await server.until_open(2)
        async with leaving(server):
            assert await idle.rest() == b""
            assert await silent.rest() == b""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT deals connections out on Linux")
async def test_a_server_that_leaves_a_shared_port_loses_no_connection() -> None:
    """Neither those that wait to be accepted nor those that arrive in the meantime."""
    async with (
        serving(is_shared=True, drain_timeout_s=FOREVER_S) as leaver,
        serving(port=leaver.port, is_shared=True) as stayer,
    ):

        async def ask() -> None:
            client = await stayer.client(GET, sees=b"done")
            await client.close()

        # The event loop accepts none of these before the stop.
        waiting = [socket.create_connection(("127.0.0.1", leaver.port)) for _ in range(64)]
        for each in waiting:
            each.sendall(GET)
        stopping = asyncio.create_task(leaver.listener.stop())
        while not stopping.done():
            await ask()
        for each in waiting:
            client = Client(*await asyncio.open_connection(sock=each))
            stayer.clients.append(client)
            await client.reader.readuntil(b"done")
        await stopping
