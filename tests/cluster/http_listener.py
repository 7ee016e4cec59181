"""An HTTP listener with a small application, and clients that write raw bytes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.guard.listener import HttpListener, listening_socket

HEAD = b"Host: here\r\n"
GET = b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n"
STREAM = b"GET /stream HTTP/1.1\r\n" + HEAD + b"\r\n"
FOREVER_S = 1000.0


class App:
    """Reads the body, then answers; ``/stream`` in two pieces, the last after ``may_end``."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.num_lost = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_lost += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"done"})


class Server:
    """One listener, its application and clients, and the reasons of its connection cuts."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        is_shared: bool = False,
        drain_timeout_s: float = 0.0,
        **limits: Any,
    ) -> None:
        self.app = App()
        self.cuts: list[str] = []
        self.clients: list[Client] = []
        timeouts = dict.fromkeys(("head_timeout_s", "body_timeout_s", "idle_timeout_s"), FOREVER_S)
        self.listener = HttpListener(
            self.app,
            limits=ConnectionLimits(**{**timeouts, **limits}),
            tls=tls,
            cut=self.cuts.append,
            drain_timeout_s=drain_timeout_s,
        )
        sock = listening_socket("127.0.0.1", port, is_shared=is_shared)
        self.port = sock.getsockname()[1]
        self.listener.start(sock)

    @property
    def num_open(self) -> int:
        return len(self.listener.connections.open)

    async def until_open(self, num: int) -> None:
        while self.num_open != num:
            await asyncio.sleep(0.005)

    async def client(
        self, data: bytes = b"", *, sees: bytes = b"", host: str = "127.0.0.1"
    ) -> "Client":
        """A client at ``host`` that has sent ``data`` and read the answer up to ``sees``."""
        local = (host, 0)
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=local))
        self.clients.append(client)
        client.writer.write(data)
        if sees:
            await client.reader.readuntil(sees)
        return client

    async def answer(self, data: bytes) -> bytes:
        """Sends ``data``; returns all bytes received until the server closes."""
        client = await self.client(data)
        return await client.rest()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self) -> bytes:
        """Reads until the server has closed; pytest's timeout is the limit."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await self.reader.read(2**16):
                data += piece
        await self.close()
        return data

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Server]:
    server = Server(**options)
    try:
        yield server
    finally:
        server.app.may_end.set()
        await server.listener.stop()
        for client in server.clients:
            await client.close()
        assert server.num_open == 0


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
