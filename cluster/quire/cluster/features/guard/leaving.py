"""How a process leaves a port shared with others (SO_REUSEPORT) without losing a connection.

The kernel assigns each new connection to one of the listening sockets. When a socket is closed, the
kernel resets connections that were assigned to it and not yet accepted. So a filter first drops the
initial packets of new connections, then the connections that have begun are accepted, and then the
socket is closed. A client whose initial packet was dropped repeats it after a second, and is
assigned to another socket.
"""

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator

from quire.cluster.features.guard.own_sockets import (
    Cookie,
    borrowed,
    cookie_of,
    descriptors,
    drop_new_connections,
)

HANDSHAKE_S = 0.3
"""Time in seconds for the last packet of a connection's handshake, a round trip after the first."""
_LOOK_EVERY_S = 0.25
_ACCEPTED_S = 5.0
"""Time in seconds for a socket's owner to accept the connections that wait at it."""

_TCP_INFO_BYTES = 104
_NUM_WAITING_AT = 24
"""Offset of the number of connections waiting to be accepted in a listening socket's TCP_INFO."""


async def stop_listening(listener: socket.socket) -> None:
    """Shuts ``listener`` down once its owner has accepted the connections assigned to it. The owner
    still has to close it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # Without the filter a few connections may be reset.
            drop_new_connections(listener.fileno())
            await asyncio.sleep(HANDSHAKE_S)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _ACCEPTED_S
        while _num_waiting(listener) and loop.time() < end_s:
            await asyncio.sleep(0.01)
    with contextlib.suppress(OSError):  # It is closed already.
        listener.shutdown(socket.SHUT_RD)


async def stop_listening_at(port: int) -> None:
    """Shuts down all sockets of this process that listen at ``port``, as `stop_listening` does."""
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(each) for each in listeners_at(port)]
        await asyncio.gather(*map(stop_listening, ours))


def listeners_at(port: int) -> Iterator[socket.socket]:
    """Duplicates of the sockets of this process that listen at ``port``; the caller closes them.
    gRPC does not expose its own."""
    for each in _ours_at(port):
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield each
        else:
            each.close()


async def wait_until_left(host: str, port: int, *, timeout_s: float) -> None:
    """Returns once this process has no connection at ``port``, no other process listens there for
    its clients to connect to, or ``timeout_s`` has passed."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while loop.time() < end_s and _is_listened_at(host, port) and _has_any_at(port):
        await asyncio.sleep(_LOOK_EVERY_S)


def _num_waiting(listener: socket.socket) -> int:
    try:
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("I", info, _NUM_WAITING_AT)[0])
    except (OSError, struct.error):
        return 0


def _ours_at(port: int) -> Iterator[socket.socket]:
    """Duplicates of this process's sockets that are bound to ``port``; the caller closes them.
    There are none without ``/proc``."""
    seen: set[Cookie] = set()  # Duplicates may get numbers still ahead in the loop.
    for fd in descriptors() if sys.platform == "linux" else ():
        cookie = cookie_of(fd)
        if cookie is None or cookie in seen:
            continue
        seen.add(cookie)
        with contextlib.suppress(OSError), borrowed(fd, cookie) as own:
            found = socket.socket(fileno=os.dup(own))
            if found.family != socket.AF_UNIX and found.getsockname()[1] == port:
                yield found
            else:
                found.close()


def _has_any_at(port: int) -> bool:
    with contextlib.ExitStack() as stack:
        # Before Python closes it, a socket that no longer listens is still bound.
        return any(_is_connected(stack.enter_context(each)) for each in _ours_at(port))


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True


def _is_listened_at(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # With this option, only a listening socket prevents the bind, and this one blocks nobody.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
