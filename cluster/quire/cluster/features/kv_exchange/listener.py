"""The port at which borrowers connect to receive blocks, and the thread that accepts them.

A new connection gets nothing until it has sent a ticket. It has `_TICKET_S` for that, including the
TLS handshake; connections beyond `_MAX_VISITORS` are closed. No connection can block another,
because the thread never waits for data of one.
"""

import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cluster.features.kv_exchange.frames import TICKET_BYTES
from quire.cluster.seldom import SeldomWarning

_log = logging.getLogger(__name__)

_MAX_VISITORS = 32
_TICKET_S = 1.0
_PAUSE_S = 0.1
"""Pause after a failed `accept`, which happens when the process has too many files open."""

Take = Callable[[bytes, socket.socket], bool]
"""Takes over a connection if its ticket is valid; returns whether it did. Called in the listener's
thread."""


@dataclass(slots=True, eq=False)
class _Visitor:
    connection: socket.socket
    late_s: float
    is_greeted: bool
    """Whether the TLS handshake is done; true without TLS."""
    ticket: bytearray = field(default_factory=bytearray)


class KvListener:
    """Listens on a free port of ``host`` until it is closed."""

    def __init__(self, host: str, *, tls: ssl.SSLContext | None, take: Take) -> None:
        self._tls = tls
        self._take = take
        self._warn = SeldomWarning(_log)
        self._warn_of_accept = SeldomWarning(_log)
        self._is_closed = threading.Event()
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((host, 0), family=family, backlog=_MAX_VISITORS)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._awake, self._wake = socket.socketpair()
        self._visitors: set[_Visitor] = set()
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._awake):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="quire-kv-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections without a ticket, and returns once the thread has ended."""
        self._is_closed.set()
        self._wake.close()  # Wakes the thread.
        self._thread.join()

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                for key, _ in self._selector.select(self._patience_s()):
                    if isinstance(key.data, _Visitor):
                        self._hear(key.data)
                    elif key.fileobj is self._listening:
                        self._accept()
                now_s = time.monotonic()
                for visitor in [each for each in self._visitors if each.late_s <= now_s]:
                    self._hang_up(visitor)
        finally:
            for visitor in tuple(self._visitors):
                self._hang_up(visitor)
            self._listening.close()
            self._awake.close()
            self._selector.close()

    def _patience_s(self) -> float | None:
        """Seconds until the first connection is late; ``None`` if there are none."""
        late_s = min((each.late_s for each in self._visitors), default=None)
        return None if late_s is None else max(0.0, late_s - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return  # It has disconnected already.
        except OSError as error:
            self._warn_of_accept("no borrower can connect: %s", error)
            self._is_closed.wait(_PAUSE_S)
            return
        if len(self._visitors) >= _MAX_VISITORS:
            connection.close()
            return
        connection.setblocking(False)
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            except OSError:
                connection.close()
                return
        visitor = _Visitor(connection, time.monotonic() + _TICKET_S, self._tls is None)
        self._visitors.add(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _hear(self, visitor: _Visitor) -> None:
        connection = visitor.connection
        try:
            if isinstance(connection, ssl.SSLSocket) and not visitor.is_greeted:
                connection.do_handshake()
                visitor.is_greeted = True
            while len(visitor.ticket) < TICKET_BYTES:
                data = connection.recv(TICKET_BYTES - len(visitor.ticket))
                if not data:
                    self._hang_up(visitor)
                    return
                visitor.ticket += data
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(connection, selectors.EVENT_READ, visitor)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_WRITE, visitor)
            return
        except (OSError, ValueError):
            self._hang_up(visitor)
            return
        self._forget(visitor)
        if not self._take(bytes(visitor.ticket), connection):
            self._warn("a connection from %s showed no valid ticket", _name_of(connection))
            connection.close()

    def _forget(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        self._selector.unregister(visitor.connection)

    def _hang_up(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        visitor.connection.close()


def _name_of(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0])
    return "nowhere"
