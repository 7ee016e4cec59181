"""A connection from the process that started a cluster to its gateways, independent of Ray.

Ray Serve tells gateways to drain, but it cannot do so once the node's raylet or GCS has died, while
gateways and groups still run. Each gateway therefore connects to a socket of the process that
started the cluster, and drains when that closes the connection. A cluster that ran before has no
such line.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

PATH = "QUIRE_LINE"
"""The environment variable with the socket's path, which all processes of a cluster inherit."""

_log = logging.getLogger(__name__)

# Gateways that were replaced stay in the queue, because nothing accepts them before the end.
_BACKLOG = 4096


class Line:
    """The socket of the process that started the cluster, in whose queue gateways wait."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def drain(self, *, timeout_s: float) -> bool:
        """Tells every gateway to drain; returns whether all had drained or were gone within
        ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            gateways = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    gateways.append(stack.enter_context(self._listener.accept()[0]))
            for gateway in gateways:
                with contextlib.suppress(OSError):  # The gateway is gone.
                    gateway.shutdown(socket.SHUT_WR)
            for gateway in gateways:
                gateway.settimeout(max(0.001, end_s - time.monotonic()))
                try:
                    gateway.recv(1)  # The gateway sends nothing, and disconnects when drained.
                except TimeoutError:
                    return False
                except OSError:
                    continue
        return True


async def drain_when_told(drain: Callable[[], Awaitable[None]]) -> None:
    """Calls ``drain`` when the process that started this cluster disconnects; returns at once if
    there is no line to it."""
    path = os.environ.get(PATH)
    if path is None:
        return
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        _log.warning("no line to what started this cluster (%s): only Serve can drain this", error)
        return
    try:
        await reader.read()
        await drain()
    finally:
        writer.close()
