"""An HTTP listening socket, with or without TLS, and the connections that it accepts.

This module accepts connections itself: uvicorn learns of a connection only after its TLS handshake,
but the connection limits count every open socket. uvicorn's server answers the requests and ends
them in order at the stop.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from quire.cluster.edge.call_records import Finish
from quire.cluster.edge.http_errors import error_response
from quire.cluster.errors import Unavailable
from quire.cluster.features.guard.connection import HttpConnection, OpenConnections, raw_response
from quire.cluster.features.guard.leaving import stop_listening
from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.guard.uvicorn_private import check_uvicorn
from quire.cluster.seldom import SeldomWarning

_log = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.1
_CUT_WITHIN_S = 1
"""How long requests that the end of the drain cancels may take to end, in seconds."""
_BACKLOG = 1024


class HttpListener:
    """Serves ``app`` from `start` to `stop`, in the event loop that both are called in.

    ``cut`` receives the reason of each connection that is refused or closed early. ``finish``
    receives the timeline of each request that does not reach ``app`` (see `OpenConnections`).
    Raises ConfigError if this class does not support the installed version of uvicorn.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
        drain_timeout_s: float = 1.0,
        cut: Callable[[str], object] = lambda reason: None,
        finish: Finish = lambda call: None,
    ) -> None:
        check_uvicorn()
        self.connections = OpenConnections(limits, cut=cut, finish=finish)
        self._tls = tls
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # Any client can send X-Forwarded-For.
                ws="none",
                timeout_graceful_shutdown=_CUT_WITHIN_S,
            )
        )
        self._drain_timeout_s = drain_timeout_s
        self._listener: socket.socket | None = None
        self._warn = SeldomWarning(_log)
        self._server.config.load()
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[object]] = set()
        error = Unavailable(
            f"all of the gateway's {limits.max_connections} connections have requests, or your "
            "address has as many as one may have: try again"
        )
        refusal = error_response(error)
        refusal.headers["Connection"] = "close"
        self._refusal = raw_response(refusal)

    def start(self, listener: socket.socket) -> None:
        """Takes over ``listener``, a non-blocking socket that listens."""
        self._listener = listener
        self._tasks = [
            asyncio.create_task(self._accept(listener)),
            asyncio.create_task(self._server.serve(sockets=[])),
        ]

    async def stop(self) -> None:
        """Accepts no more connections, lets requests end for up to the drain timeout, then closes
        all.

        No client finds a connection closed that its last answer promised to keep, unless it has
        been idle for `LEAVE_S`.
        """
        if self._listener is None:
            return
        accepting, serving = self._tasks
        self.connections.begin_leaving()
        await stop_listening(self._listener)
        accepting.cancel()
        await self.connections.wait_until_left(timeout_s=self._drain_timeout_s)
        for task in self._opening:
            task.cancel()
        for refused in list(self.connections.refused):
            refused.abort()
        self._server.should_exit = True
        await asyncio.gather(accepting, serving, *self._opening, return_exceptions=True)
        for connection in list(self.connections.open):
            connection.abort()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    client, address = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno == errno.EINVAL:  # The listening socket was shut down.
                        return
                    # The client is gone, or this process has no file descriptor left.
                    self._warn("a connection cannot be accepted: %s", error)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                task = asyncio.create_task(self._open(client, host=address[0]))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
                # Waiting connections are accepted without a pause, so yield to other tasks.
                await asyncio.sleep(0)

    async def _open(self, client: socket.socket, *, host: str) -> None:
        connection = HttpConnection(
            host=host,
            connections=self.connections,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state={},
        )
        if self.connections.admit(connection):
            connection.begin()
        elif self._tls is None and self.connections.may_refuse:
            connection.turn_away(self._refusal)
        else:
            client.close()
            return
        connection.opening = asyncio.current_task()
        loop = asyncio.get_running_loop()
        timeout_s = self.connections.limits.head_timeout_s if self._tls is not None else None
        # The connection cancels this task when its deadline passes or its place is needed.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        connection.opening = None
        if connection.transport is None:  # Also without an exception: the client is gone.
            connection.abort()
            client.close()


class _Server(uvicorn.Server):
    """A uvicorn server that its listener stops. The process that it is part of handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listening_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket for `HttpListener.start`. With ``is_shared``, other processes of this node can bind
    the same port if they all set it. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named explicitly: asyncio turns Nagle's algorithm off only for sockets that
    # say TCP. With Nagle's algorithm, a small piece of a stream would wait up to 40 ms for the
    # previous one's ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
