"""A borrower's connection to a lender, which can be abandoned at any moment.

No call on the socket takes longer than `_LOOK_S`. After each, the connection checks whether it is
still wanted, so that a stopped or slow peer does not block resources of this group.
"""

import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable

from quire.cluster.tls import CERTIFICATE_NAME, trusting_only

_LOOK_S = 0.05


class KvConnection:
    """A connection to ``host:port``. ``check`` raises when it is no longer wanted.

    ``certificate`` is the only certificate to accept, PEM; empty is without TLS. ``stall_s`` is the
    most time without data. Every call may raise OSError, including TimeoutError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        certificate: str,
        check: Callable[[], None],
        stall_s: float,
    ) -> None:
        self._check = check
        self._stall_s = stall_s
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setblocking(False)
            error = self._socket.connect_ex(address)
            if error == errno.EINPROGRESS:
                self._wait(select.POLLOUT, "no connection")
                error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if certificate:
                self._greet(certificate)
            else:
                # One system call receives a block, if it arrives in time. If each part of it woke
                # this thread, it would wait for the interpreter lock, which the engine often holds.
                self._socket.setblocking(True)
                wait_s = struct.pack("ll", 0, int(_LOOK_S * 1e6))
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait_s)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Sends a few bytes, for which the kernel's buffer has room."""
        self._socket.sendall(data)

    def receive_into(self, view: memoryview) -> int:
        """Receives into ``view`` until it is full or `_LOOK_S` has passed; returns the number of
        bytes, at least one. Raises EOFError: the peer has closed the connection."""
        until_s = time.monotonic() + self._stall_s
        while True:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    num_bytes = self._socket.recv_into(view)
                else:
                    num_bytes = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, "nothing came")
                continue
            except BlockingIOError:
                self._check()
                if time.monotonic() > until_s:
                    raise TimeoutError(f"nothing came for {self._stall_s:g} s") from None
                continue
            if not num_bytes:
                raise EOFError
            self._check()
            return num_bytes

    def _greet(self, certificate: str) -> None:
        connection = trusting_only(certificate).wrap_socket(
            self._socket, server_hostname=CERTIFICATE_NAME, do_handshake_on_connect=False
        )
        self._socket = connection
        while True:
            try:
                connection.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, "no TLS handshake")
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, "no TLS handshake")

    def _wait(self, event: int, what: str) -> None:
        """Returns once the socket is ready for ``event``. Raises TimeoutError after ``stall_s``,
        with ``what`` in its message."""
        poll = select.poll()
        poll.register(self._socket, event)
        until_s = time.monotonic() + self._stall_s
        while not poll.poll(_LOOK_S * 1000):
            self._check()
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what} for {self._stall_s:g} s")
