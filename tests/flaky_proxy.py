"""A TCP proxy that injects faults of networks and machines into what a server sends.

Data from clients passes unharmed. A fault's positions count bytes of one connection's stream, and
each connection gets the whole fault.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_CHUNK_BYTES = 65_536


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What the proxy does to each connection; by default nothing."""

    cut_at: int | None = None
    """The number of bytes after which the connection ends."""
    stall_at: int | None = None
    """The number of bytes after which nothing more is sent, with the connection left open."""
    flip_at: int | None = None
    """The index of a byte of which one bit is flipped."""
    bytes_per_s: float | None = None
    edit: Callable[[bytes], bytes] | None = None
    """Rewrites the whole stream, which is sent once the server has ended it."""


@dataclass(eq=False)
class FlakyProxy:
    """Listens on loopback while it is entered, in front of ``port`` there."""

    port_behind: int
    fault: Fault = field(default_factory=Fault)
    """The fault of new connections; a replacement takes effect with the next one."""

    def __enter__(self) -> "FlakyProxy":
        self._closed = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for each in (self._server, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._server, *self._open):
            each.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.port_behind))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            for pump in (
                threading.Thread(target=self._pass, args=(client, server), daemon=True),
                threading.Thread(target=self._spoil, args=(server, client), daemon=True),
            ):
                self._threads.append(pump)
                pump.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                target.sendall(data)
        _end(source, target)

    def _spoil(self, source: socket.socket, target: socket.socket) -> None:
        fault = self.fault
        num_sent = 0
        with contextlib.suppress(OSError):
            if fault.edit is not None:
                target.sendall(fault.edit(_all_of(source)))
            while data := source.recv(_CHUNK_BYTES):
                if fault.flip_at is not None and 0 <= fault.flip_at - num_sent < len(data):
                    place = fault.flip_at - num_sent
                    data = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
                if fault.stall_at is not None and num_sent + len(data) > fault.stall_at:
                    target.sendall(data[: fault.stall_at - num_sent])
                    self._closed.wait()
                    return
                if fault.cut_at is not None and num_sent + len(data) > fault.cut_at:
                    target.sendall(data[: fault.cut_at - num_sent])
                    break
                self._send(target, data)
                num_sent += len(data)
        _end(source, target)

    def _send(self, target: socket.socket, data: bytes) -> None:
        if self.fault.bytes_per_s is None:
            target.sendall(data)
            return
        for begin in range(0, len(data), 64):
            piece = data[begin : begin + 64]
            target.sendall(piece)
            if self._closed.wait(len(piece) / self.fault.bytes_per_s):
                return


def _all_of(source: socket.socket) -> bytes:
    parts = []
    while data := source.recv(_CHUNK_BYTES):
        parts.append(data)
    return b"".join(parts)


def _end(*connections: socket.socket) -> None:
    for each in connections:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
