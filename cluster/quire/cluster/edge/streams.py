"""Server-sent events, client disconnects and request ids: what Starlette leaves open.

Starlette's own streaming response notices a disconnect only with some versions of ASGI. Here a
disconnect cancels the work, and the response returns only after the work has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")

_MAX_ID_CHARS = 200
_LINGER_S = 2.0
_LINGER_BYTES = 64 << 20


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Awaits ``work``, and cancels it when the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    return await _race(work, request.receive)


def event(piece: Mapping[str, Any] | str) -> bytes:
    """``piece`` as the data of a server-sent event. The event is named by its ``type``, if any."""
    if isinstance(piece, str):
        return b"data: %b\n\n" % piece.encode()
    data = to_json(piece)
    if "type" in piece:
        return b"event: %b\ndata: %b\n\n" % (piece["type"].encode(), data)
    return b"data: %b\n\n" % data


Write = Callable[[bytes], Awaitable[None]]


class EventStream(Response):
    """Sends server-sent events.

    ``produce`` receives a function that writes one or several whole events. The status goes out
    with the first event; an exception that ``produce`` raises before it decides the status instead.
    ``produce`` is cancelled when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Write], Awaitable[None]]) -> None:
        # Without this header, nginx buffers the stream and sends it in pieces of its own size.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(self._send(send), receive)
        except (ClientDisconnect, OSError):
            return

    async def _send(self, send: Send) -> None:
        is_begun = False

        async def write(events: bytes) -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                status, headers = self.status_code, self.raw_headers
                await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": events, "more_body": True})

        await self._produce(write)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class UnreadResponse(JSONResponse):
    """The answer to a request whose body was not read to its end. It closes the connection.

    Before that, the rest of the body is read and discarded for a while: a connection that is closed
    while its client still sends is reset, and the answer is lost.
    """

    def __init__(self, content: object, *, status_code: int, headers: Mapping[str, str]) -> None:
        # Otherwise the server would look for the next request behind the body.
        super().__init__(content, status_code, {**headers, "Connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await _rest_of_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def client_id(headers: Headers) -> str:
    """The client's own id for its request; empty if it is missing or not valid."""
    return sane_client_id(headers.get("x-request-id", ""))


def sane_client_id(name: str) -> str:
    """``name``, or "" if it is too long to keep or has more than printable ASCII: the name is
    logged and sent back."""
    is_sane = len(name) <= _MAX_ID_CHARS and name.isascii() and name.isprintable()
    return name if is_sane else ""


class RequestIds:
    """Middleware that echoes the client's ``X-Request-Id``, if it is valid, on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        request_id = client_id(Headers(scope=scope)) if is_http else ""
        if not request_id:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _race(work: Awaitable[T], receive: Receive) -> T:
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        # Wait until the cancelled work has cleaned up.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _rest_of_body(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes < _LINGER_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
