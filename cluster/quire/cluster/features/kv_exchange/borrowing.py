"""Fetches blocks from other groups into this group's host memory.

Each pull has a thread, which waits for a slot, asks the other group over gRPC and then receives
straight into granted slots, without a copy. A block is accepted only if its place, name and length
are those requested, and its bytes have the checksum in its header. Anything else ends the pull with
an error that names peer, block and reason; the request then computes the missing blocks. A thread
that has finished a pull waits for the next one, because starting threads delays the engine's.

A cancelled pull closes its connection within `_LOOK_S`. A peer that failed is not asked again for
`_SHUNNED_S`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import grpc.aio

from quire.cluster.features.kv_exchange.connection import KvConnection
from quire.cluster.features.kv_exchange.frames import (
    HEADER_BYTES,
    MAX_REASON_BYTES,
    TICKET_BYTES,
    Checksum,
    Header,
    checksum,
    parse_header,
)
from quire.cluster.features.kv_exchange.peer_links import PeerLinks
from quire.cluster.wire import format_to_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.parts.tiers.pull import Pull

_log = logging.getLogger(__name__)

_MAX_PULLS = 64
_MAX_IDLE = 8
"""Most threads that wait for a pull."""
_ASK_S = 3.0
"""Timeout of a peer's answer, which may take more than a step of its engine."""
_STALL_S = 2.0
_SHUNNED_S = 5.0
_MAX_SHUNNED = 64
_UNHEARD_S = 1.0
"""A peer counts as failed if it has sent nothing for this long when its pull is cancelled."""
_LOOK_S = 0.05
_HASHED_BYTES = 512 << 10
_JOIN_S = 1.0


class _Ended(Exception):
    """Why a pull ends before its last block."""

    def __init__(self, reason: str, *, is_fault: bool = True) -> None:
        super().__init__(reason)
        self.is_fault = is_fault
        """Whether the peer is at fault; it is then not asked again for a while."""


class Outcome(NamedTuple):
    """How a pull ended."""

    num_blocks: int
    """Number of blocks that were received."""
    error: str


@dataclass(frozen=True, slots=True)
class _Expected:
    loan: pb.BlocksLoan
    outcome: "asyncio.Future[Outcome]"

    def tell(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Borrower:
    """Fetches the blocks of pulls whose source is a peer. It is made inside an event loop."""

    def __init__(
        self,
        *,
        ask_s: float = _ASK_S,
        stall_s: float = _STALL_S,
        shunned_s: float = _SHUNNED_S,
    ) -> None:
        self._ask_s = ask_s
        self._stall_s = stall_s
        self._shunned_s = shunned_s
        self._loop = asyncio.get_running_loop()
        self._links = PeerLinks()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._num_pulls = 0  # Each has one of the threads; the others are idle.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._shunned: dict[str, float] = {}  # End of the time without requests, by address.
        self._expected: dict[PeerSource, _Expected] = {}
        self._is_closing = False

    @property
    def num_pulls(self) -> int:
        return self._num_pulls

    def fetch(self, pull: Pull) -> None:
        """Starts a pull and returns at once, in any thread (a `Fetch` of the tiers)."""
        source = pull.source
        assert source is not None, "a pull from another group has a source"
        with self._lock:
            expected = self._expected.pop(source, None)
        with self._lock:
            reason = self._why_not(source) or self._provide_thread()
            if not reason:
                self._num_pulls += 1
                self._jobs.put((pull, source, expected))
        if reason:
            self._end(pull, expected, _told(source, reason))

    async def most_useful(
        self, source: PeerSource, max_bytes: int, *, format: KvFormat
    ) -> pb.BlocksLoan:
        """Asks ``source`` for its most useful blocks, ``max_bytes`` at most. Raises AioRpcError."""
        request = pb.BlocksRequest(format=format_to_proto(format), most_useful_bytes=max_bytes)
        return await self._links.blocks(source, request, timeout_s=self._ask_s)

    def expect(self, source: PeerSource, loan: pb.BlocksLoan) -> "asyncio.Future[Outcome]":
        """Makes the next pull from ``source`` use ``loan``, if that has the blocks that the pull
        wants. The future is done when the pull has ended; cancelling it ends the expectation."""
        outcome: asyncio.Future[Outcome] = self._loop.create_future()
        with self._lock:
            self._expected[source] = _Expected(loan, outcome)
        outcome.add_done_callback(lambda _: self._expected.pop(source, None))
        return outcome

    async def close(self) -> None:
        """Ends every pull, within about a second."""
        with self._lock:
            self._is_closing = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        until_s = time.monotonic() + _JOIN_S
        for thread in threads:
            await asyncio.to_thread(thread.join, max(0.0, until_s - time.monotonic()))
        await self._links.close()

    def _why_not(self, source: PeerSource) -> str:
        """Why nothing may be fetched from ``source`` now; empty if it may."""
        if self._is_closing:
            return "this group is stopping"
        if self._num_pulls >= _MAX_PULLS:
            return f"busy: {_MAX_PULLS} pulls are under way"
        if time.monotonic() < self._shunned.get(source.address, 0.0):
            return "it failed a moment ago"
        return ""

    def _provide_thread(self) -> str:
        """Starts a thread if none is idle. Returns why it cannot; empty if there is one."""
        if len(self._threads) > self._num_pulls:
            return ""
        thread = threading.Thread(target=self._run_all, name="quire-kv-pull", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # The process cannot start more threads.
            self._threads.discard(thread)
            return str(error)
        return ""

    # In the thread of a pull.

    def _run_all(self) -> None:
        """Runs one pull after another, until too many threads are idle."""
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            with self._lock:
                if len(self._threads) - self._num_pulls > _MAX_IDLE:
                    self._threads.discard(threading.current_thread())
                    return

    def _run(self, pull: Pull, source: PeerSource, expected: "_Expected | None") -> None:
        error = ""
        try:
            borrowing = _Borrowing(
                pull,
                source,
                ask=self._ask,
                is_closing=lambda: self._is_closing,
                stall_s=self._stall_s,
            )
            is_expected = expected and expected.loan.hashes.startswith(pull.hashes.data)
            borrowing.run(expected.loan if expected and is_expected else None)
        except _Ended as ended:
            error = _told(source, str(ended))
            _log.log(logging.WARNING if ended.is_fault else logging.INFO, error)
            if ended.is_fault:
                self._shun(source.address)
        except Exception as raised:
            _log.exception("a pull failed")
            error = _told(source, repr(raised))
        finally:
            with self._lock:
                self._num_pulls -= 1
            self._end(pull, expected, error)

    def _end(self, pull: Pull, expected: "_Expected | None", error: str) -> None:
        pull.end(error)
        if expected is not None:
            outcome = Outcome(pull.num_bytes // pull.format.block_bytes, error)
            with contextlib.suppress(RuntimeError):  # The event loop is closed.
                self._loop.call_soon_threadsafe(expected.tell, outcome)

    def _shun(self, address: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            kept = sorted((until_s, each) for each, until_s in self._shunned.items())
            self._shunned = {
                each: until_s for until_s, each in kept[-_MAX_SHUNNED + 1 :] if until_s > now_s
            }
            self._shunned[address] = now_s + self._shunned_s

    def _ask(
        self, source: PeerSource, request: pb.BlocksRequest
    ) -> "concurrent.futures.Future[pb.BlocksLoan]":
        call = self._links.blocks(source, request, timeout_s=self._ask_s)
        return asyncio.run_coroutine_threadsafe(call, self._loop)


_Job = tuple[Pull, PeerSource, "_Expected | None"]
Ask = Callable[[PeerSource, pb.BlocksRequest], "concurrent.futures.Future[pb.BlocksLoan]"]


class _Borrowing:
    """One pull from one peer, run in a thread."""

    def __init__(
        self,
        pull: Pull,
        source: PeerSource,
        *,
        ask: Ask,
        is_closing: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self._pull = pull
        self._source = source
        self._ask_peer = ask
        self._is_closing = is_closing
        self._stall_s = stall_s
        self._begin_s = time.monotonic()
        self._until_s = inf
        self._is_heard = False  # Whether the peer has answered.
        self._doing = "asking"
        self._next: int | None = None
        """A slot that was granted for the next block."""

    def run(self, loan: pb.BlocksLoan | None = None) -> None:
        """Receives all blocks. ``loan``: the peer's answer, if there is one already. Raises _Ended:
        not all blocks were received."""
        try:
            self._next = self._slot()  # Before it asks, so that no loan waits for room here.
            self._run(loan or self._ask())
        except _Ended as ended:
            raise _Ended(f"{self._doing}: {ended}", is_fault=ended.is_fault) from None
        except EOFError:
            raise _Ended(f"{self._doing}: the connection ended") from None
        except OSError as error:
            raise _Ended(f"{self._doing}: {error}") from None

    def _run(self, loan: pb.BlocksLoan) -> None:
        num_wanted = len(self._pull.hashes)
        if loan.refusal:
            raise _Ended(f"it refused: {loan.refusal}", is_fault=False)
        if not loan.num_blocks or len(loan.ticket) != TICKET_BYTES:
            raise _Ended(f"its answer has {loan.num_blocks} blocks and no whole ticket")
        num_blocks = min(loan.num_blocks, num_wanted)
        self._is_heard = True
        self._until_s = time.monotonic() + loan.lease_s + self._stall_s
        self._doing = f"connecting to port {loan.port}"
        connection = KvConnection(
            self._source.address.rpartition(":")[0].strip("[]"),
            loan.port,
            certificate=self._source.certificate,
            check=self._check,
            stall_s=self._stall_s,
        )
        try:
            connection.send(loan.ticket)
            for index in range(num_blocks):
                self._doing = f"block {index} of {num_blocks}"
                self._receive(connection, index)
        finally:
            connection.close()
        if num_blocks < num_wanted:
            self._doing = f"{num_blocks} of {num_wanted} blocks"
            raise _Ended("it has no more", is_fault=False)

    def _ask(self) -> pb.BlocksLoan:
        request = pb.BlocksRequest(
            format=format_to_proto(self._pull.format), hashes=self._pull.hashes.data
        )
        answer = self._ask_peer(self._source, request)
        while True:
            try:
                return answer.result(_LOOK_S)
            except TimeoutError:
                try:
                    self._check()
                except _Ended:
                    answer.cancel()
                    raise
            except grpc.aio.AioRpcError as error:
                raise _Ended(f"{error.code().name}: {error.details()}") from None
            except (grpc.aio.UsageError, concurrent.futures.CancelledError) as error:
                raise _Ended(f"the call was ended: {error!r}", is_fault=False) from None

    def _receive(self, connection: KvConnection, index: int) -> None:
        """Receives block ``index`` into a slot."""
        pull = self._pull
        header = self._header(connection)
        if header.is_end:
            raise _Ended(f"the peer sends no more: {self._reason(connection, header)}")
        name, block_bytes = pull.hashes[index], pull.format.block_bytes
        if header.place != index:
            raise _Ended(f"its place is {header.place}, not {index}")
        if header.name != name:
            raise _Ended(f"its name is {header.name.hex()}, not {name.hex()}")
        if header.num_bytes != block_bytes:
            raise _Ended(f"its length is {header.num_bytes}, not {block_bytes}")
        slot = self._slot() if self._next is None else self._next
        self._next = None
        block = memoryview(pull.host_blocks_XC[slot])
        came = Checksum()
        num_bytes = 0
        while num_bytes < len(block):
            begin, num_bytes = num_bytes, num_bytes + connection.receive_into(block[num_bytes:])
            # Hashed now, while the bytes are in the CPU's cache. Each part is so short that the
            # interpreter lock is kept: getting it back would take far longer than the hash.
            for part in range(begin, num_bytes, _HASHED_BYTES):
                came.update(block[part : min(part + _HASHED_BYTES, num_bytes)])
        pull.num_bytes += num_bytes
        if came.digest() != header.checksum:
            raise _Ended("its bytes do not have the checksum that came with them")
        pull.landed(index, slot, header.checksum)

    def _header(self, connection: KvConnection) -> Header:
        data = bytearray(HEADER_BYTES)
        self._fill(connection, memoryview(data))
        try:
            return parse_header(data)
        except ValueError as error:
            raise _Ended(str(error)) from None

    def _reason(self, connection: KvConnection, header: Header) -> str:
        if header.num_bytes > MAX_REASON_BYTES:
            raise _Ended(f"its end has a reason of {header.num_bytes} bytes")
        data = bytearray(header.num_bytes)
        self._fill(connection, memoryview(data))
        if checksum(data) != header.checksum:
            raise _Ended("its end is broken")
        return data.decode(errors="replace")

    def _fill(self, connection: KvConnection, view: memoryview) -> None:
        num_bytes = 0
        while num_bytes < len(view):
            num_bytes += connection.receive_into(view[num_bytes:])

    def _slot(self) -> int:
        """Waits until the engine has room."""
        while True:
            slot = self._pull.next_slot(_LOOK_S)
            if slot is not None:
                return slot
            self._check()

    def _check(self) -> None:
        """Raises _Ended: the pull was cancelled, the group stops, or the lease is over."""
        now_s = time.monotonic()
        if self._pull.is_cancelled:
            is_fault = not self._is_heard and now_s - self._begin_s > _UNHEARD_S
            raise _Ended("it is not waited for any longer", is_fault=is_fault)
        if self._is_closing():
            raise _Ended("this group is stopping", is_fault=False)
        if now_s > self._until_s:
            raise _Ended("the lease is over")


def _told(source: PeerSource, reason: str) -> str:
    return f"peer {source.group_id} at {source.address}: {reason}"
