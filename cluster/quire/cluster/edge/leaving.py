"""How a process leaves a port that others share (SO_REUSEPORT), without losing a connection.

The kernel deals each new connection to one of the listening sockets. When one of them is closed, it
resets the connections that were dealt to it and not accepted. So the socket is first closed to new
ones, by a filter that drops their first packet; those that have begun are accepted; then it is
closed. A client whose first packet was dropped repeats it after a second, and is dealt to another
socket.
"""

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator

from quire.cluster.edge.own_sockets import (
    Cookie,
    borrowed,
    cookie_of,
    descriptors,
    drop_new_connections,
)

HANDSHAKE_S = 0.3
"""Time for the last packet of a connection's handshake, a round trip after the first."""
_LOOK_EVERY_S = 0.25
_ACCEPTED_S = 5.0
"""Time for a listening socket's owner to accept the connections that wait there."""

_TCP_INFO_BYTES = 104
_NUM_WAITING_AT = 24
"""Offset in a listening socket's TCP_INFO of the number of connections that wait to be accepted."""


async def stop_listening(listener: socket.socket) -> None:
    """Ends ``listener``, once its owner has accepted what was dealt to it. The owner still has to
    close it."""
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
    """The same for all sockets of this process that listen at ``port``, whoever owns them."""
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(each) for each in listeners_at(port)]
        await asyncio.gather(*map(stop_listening, ours))


def listeners_at(port: int) -> Iterator[socket.socket]:
    """Duplicates of the sockets of this process that listen at ``port``, for the caller to close.
    gRPC shows nobody its own."""
    for each in _ours_at(port):
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield each
        else:
            each.close()


async def wait_until_left(host: str, port: int, *, timeout_s: float) -> None:
    """Until this process has no connection at ``port``, nobody else listens there whom a client
    could turn to, or ``timeout_s`` has passed."""
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
    """Duplicates of this process's sockets that are bound to ``port``, for the caller to close;
    none where there is no ``/proc``."""
    seen: set[Cookie] = set()  # A duplicate may get a number that is still to be looked at.
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
        # So that only a socket that listens is in the way, and this one in nobody's.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
