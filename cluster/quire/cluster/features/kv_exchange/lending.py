"""Lends a group's blocks to other groups.

A borrower asks for blocks over gRPC, opens a TCP connection, sends a one-time ticket on it, and
receives the blocks' bytes there: straight from host memory, without a copy. If the group has TLS,
that connection uses the same certificate.

The cost of borrowers is bounded. There are at most `_MAX_LOANS` loans and as many threads. A loan
ends if its ticket is not used in time, or if the borrower does not read. Each host gets its bytes
at a limited rate, which leaves memory bandwidth to the group's own requests.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from quire.cluster.features.kv_exchange.frames import TICKET_BYTES, block_header, end_frame
from quire.cluster.features.kv_exchange.listener import KvListener
from quire.cluster.wire import format_from_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.hashing import HASH_BYTES, BlockHashes
from quire.worker.blocks.kv_format import KvFormat
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.pace import Pace
from quire.worker.request.errors import QueueFull, RankFailure

_log = logging.getLogger(__name__)

_MAX_LOANS = 16
_MAX_BLOCKS = 65_536
"""Most blocks of one request."""
_CLAIM_S = 2.0
"""Time from the answer with a ticket until the ticket must be used."""
_LEASE_S = 20.0
"""Time from the answer until the last block must be sent."""
_STALL_S = 5.0
"""How long a borrower may take for one block, because it may have to wait for room."""
BYTES_PER_S = 3e9
"""Rate to one host: what a link of 25 Gb/s carries."""
_LOOK_S = 0.05
_JOIN_S = 1.0
_NO_PARENT = bytes(HASH_BYTES)

T = TypeVar("T")


class Call(Protocol):
    """The type of `EngineLoop.call`."""

    def __call__(self, function: Callable[[GroupEngine], T]) -> Awaitable[T]: ...


class LendKept(Protocol):
    """The type of `EngineLoop.lend_kept`."""

    def __call__(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    loan: Loan
    until_s: float
    """The end of the lease, on the monotonic clock."""


class Lender:
    """Answers `Blocks` calls, in the event loop that it was made in, and sends the blocks.

    ``call`` runs a function in the engine's thread; ``lend_kept`` lends without waiting for it.
    ``tls`` is the context of the group's gRPC port.
    """

    def __init__(
        self,
        call: Call,
        lend_kept: LendKept,
        *,
        format: KvFormat,
        host: str,
        tls: ssl.SSLContext | None = None,
        bytes_per_s: float = BYTES_PER_S,
        lease_s: float = _LEASE_S,
        stall_s: float = _STALL_S,
        claim_s: float = _CLAIM_S,
    ) -> None:
        self._call = call
        self._lend_kept = lend_kept
        self._format = format
        self._bytes_per_s = bytes_per_s
        self._lease_s, self._stall_s, self._claim_s = lease_s, stall_s, claim_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._places: set[bytes] = set()  # Tickets of all loans: requested, offered and running.
        self._offers: dict[bytes, _Offer] = {}
        self._senders: dict[socket.socket, threading.Thread] = {}
        self._paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()
        self._is_closing = threading.Event()
        self._listener = KvListener(host, tls=tls, take=self._take)

    @property
    def port(self) -> int:
        """The port for borrowers' connections."""
        return self._listener.port

    @property
    def num_loans(self) -> int:
        return len(self._places)

    async def lend(self, request: pb.BlocksRequest) -> pb.BlocksLoan:
        """The answer to a `Blocks` call: a loan or a refusal. Raises ValueError: its hashes are
        malformed."""
        borrowers = format_from_proto(request.format)
        if difference := borrowers.difference(self._format):
            return _refusal(f"formats differ: the borrower's blocks have {difference}")
        hashes = BlockHashes(request.hashes)[:_MAX_BLOCKS]
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            if self._is_closing.is_set():
                return _refusal("the group is stopping")
            if len(self._places) >= _MAX_LOANS:
                return _refusal(f"busy: {_MAX_LOANS} loans are under way")
            self._places.add(ticket)

        def borrow(engine: GroupEngine) -> Loan | str:
            if request.most_useful_bytes:
                loan = engine.lend_most_useful(request.most_useful_bytes)
            else:
                loan = engine.lend(hashes, borrower_format=borrowers)
            # Here and not after the call, because that may be cancelled meanwhile.
            if isinstance(loan, str) or not loan.hashes:
                self._end(ticket)
            else:
                self._offer(ticket, loan)
            return loan

        kept = None
        if not request.most_useful_bytes:
            kept = self._lend_kept(hashes, borrower_format=borrowers)
        if kept is not None:
            self._offer(ticket, kept)
        try:
            loan: Loan | str = await self._call(borrow) if kept is None else kept
        except (RankFailure, QueueFull) as error:
            self._end(ticket)
            return _refusal(str(error))
        if isinstance(loan, str) or not loan.hashes:
            return _refusal(loan if isinstance(loan, str) else "it has none of these blocks")
        answer = pb.BlocksLoan(
            num_blocks=len(loan.hashes), port=self.port, ticket=ticket, lease_s=self._lease_s
        )
        if request.most_useful_bytes:
            answer.hashes = loan.hashes.data
            answer.parents = b"".join([parent or _NO_PARENT for parent in loan.parents])
        return answer

    def close(self) -> None:
        """Ends every loan; blocks for a second at most."""
        self._is_closing.set()
        self._listener.close()
        with self._lock:
            offers, self._offers = self._offers, {}
            senders = dict(self._senders)
        for ticket, offer in offers.items():
            offer.loan.close()
            self._end(ticket)
        for connection in senders:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + _JOIN_S
        for thread in senders.values():
            thread.join(max(0.0, until_s - time.monotonic()))

    # In the engine's thread or the event loop.

    def _offer(self, ticket: bytes, loan: Loan) -> None:
        """Makes ``loan`` available to the borrower with ``ticket`` for `_CLAIM_S`."""
        with self._lock:
            is_late = self._is_closing.is_set()
            if not is_late:
                self._offers[ticket] = _Offer(loan, time.monotonic() + self._lease_s)
        if is_late:
            loan.close()
            self._end(ticket)
            return
        with contextlib.suppress(RuntimeError):  # The event loop is closed; the lender soon is.
            self._loop.call_soon_threadsafe(
                lambda: self._loop.call_later(self._claim_s, self._withdraw, ticket)
            )

    def _withdraw(self, ticket: bytes) -> None:
        """Ends a loan whose ticket was not used in time."""
        with self._lock:
            offer = self._offers.pop(ticket, None)
        if offer is not None:
            offer.loan.close()
            self._end(ticket)

    def _end(self, ticket: bytes) -> None:
        with self._lock:
            self._places.discard(ticket)

    # In the listener's thread.

    def _take(self, ticket: bytes, connection: socket.socket) -> bool:
        try:
            host = connection.getpeername()[0]
        except OSError:
            return False  # The borrower has disconnected.
        with self._lock:
            if self._is_closing.is_set() or ticket not in self._offers:
                return False
            offer = self._offers.pop(ticket)
            pace = self._paces.setdefault(host, Pace(self._bytes_per_s))
            thread = threading.Thread(
                target=self._serve,
                args=(ticket, offer, connection, pace),
                name="quire-kv-sender",
                daemon=True,
            )
            self._senders[connection] = thread
            try:
                thread.start()
            except RuntimeError as error:  # The process cannot start more threads.
                _log.warning("a loan cannot be sent: %s", error)
                del self._senders[connection]
                self._offers[ticket] = offer  # It is withdrawn soon.
                return False
        return True

    # In a thread per loan.

    def _serve(self, ticket: bytes, offer: _Offer, connection: socket.socket, pace: Pace) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _bound_sends(connection, self._stall_s)
                self._send(offer, connection, pace)
        except OSError as error:
            # The borrower has disconnected or does not read; it knows which blocks it has.
            _log.debug("a loan of %d blocks ended early: %s", len(offer.loan.hashes), error)
        finally:
            offer.loan.close()
            with self._lock:
                del self._senders[connection]
            self._end(ticket)

    def _send(self, offer: _Offer, connection: socket.socket, pace: Pace) -> None:
        """Sends the loan's blocks. Raises OSError: the connection broke, or the borrower took too
        long."""
        loan, reason = offer.loan, ""
        num_sent = 0
        while num_sent < len(loan.hashes):
            lent = self._next(offer)
            if lent is None:
                reason = loan.error or "the lease is over"
                break
            try:
                block = memoryview(loan.host_blocks_XC[lent.slot])
                self._is_closing.wait(pace.delay_s(len(block)))
                name = loan.hashes[lent.index]
                header = block_header(
                    lent.index, name=name, num_bytes=len(block), checksum=lent.checksum
                )
                until_s = min(time.monotonic() + self._stall_s, offer.until_s)
                _send_all(connection, until_s, header, block)
            finally:
                loan.give_back(lent.slot)
            num_sent += 1
        _send_all(connection, time.monotonic() + self._stall_s, end_frame(num_sent, reason))

    def _next(self, offer: _Offer) -> Lent | None:
        """The loan's next block; ``None`` if no more come within the lease."""
        loan = offer.loan
        while not self._is_closing.is_set() and time.monotonic() < offer.until_s:
            lent = loan.next(_LOOK_S)
            if lent is not None or loan.error:
                return lent
        return None


def _bound_sends(connection: socket.socket, timeout_s: float) -> None:
    """Limits sends to ``timeout_s``. Without TLS, one system call then sends as much as possible.

    With Python's own timeout, each part that fits would wake the thread, which then waits for the
    interpreter lock whenever the engine's thread is busy.
    """
    connection.settimeout(timeout_s)
    if not isinstance(connection, ssl.SSLSocket):
        connection.setblocking(True)
        seconds, fraction = divmod(timeout_s, 1)
        timeval = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _send_all(connection: socket.socket, until_s: float, *parts: bytes | memoryview) -> None:
    """Sends all ``parts``. Raises OSError: the connection broke, or the borrower does not read."""
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return
    left = [memoryview(part) for part in parts]
    while left:
        num_sent = connection.sendmsg(left)
        while left and num_sent >= len(left[0]):
            num_sent -= len(left.pop(0))
        if left:
            left[0] = left[0][num_sent:]
            if time.monotonic() > until_s:
                raise TimeoutError("the borrower does not read")


def _refusal(reason: str) -> pb.BlocksLoan:
    return pb.BlocksLoan(refusal=reason)
