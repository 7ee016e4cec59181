"""Ends gRPC connections that flood: those that send more bytes than their calls account for.

gRPC core reads every frame of a client before any code of ours runs, and limits few of them:
endless header blocks, frames that change nothing, streams that are reset at once. All of them are
bytes, which the kernel counts for each connection, under TLS too. A thread compares these counts,
many times a second, with the bytes that the connection's calls explain (`Account`). Clients without
an admitted call, *strangers*, have nothing that explains their bytes.

gRPC core also receives whole messages before the event loop knows of their calls. So bytes count
against a connection only once the event loop has had time for its calls, except during floods.

An address that floods repeatedly is shut out for a while: the connections of its strangers are
ended, and the kernel drops its new connections. None of this costs time per token: an account
changes once per call, and a check takes two system calls per connection.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar
from urllib.parse import unquote

from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.guard.own_sockets import (
    Cookie,
    acked_and_received,
    borrowed,
    connection_of,
    cookie_of,
    descriptors,
    end,
    listening_port,
    num_accepted,
    shut_out,
)
from quire.cluster.seldom import SeldomWarning

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_MESSAGE_BYTES = 4 * 2**20
"""Longest message from a client. gRPC holds each call's message whole before a handler sees it."""

_LOOK_S = 0.01
_AWAKE_S = 1.0
"""How long checks go on after the kernel has accepted a connection: gRPC takes it a bit later."""
_ASLEEP_S = 0.5
"""Interval of checks while there is no connection and the kernel accepts none."""
_MAX_SHARE = 0.05
"""Share of one core's time for checks: with thousands of connections, they become rarer."""
_DESCRIPTORS_S = 0.5
"""How often the number of file descriptors, which grows by doubling, is read, in seconds."""
_NUM_TURNS = 5
"""Event loop turns, counted between checks, after which it must know of a connection's calls."""
_MAX_WAITING_BYTES = 256 * 2**20
"""Most unexplained bytes, over all connections, whose calls the event loop had no time for: they
fill memory."""
_MAX_BUSY_STRANGERS = 3
_BUSY_BYTES = 16 * 2**10
"""If more strangers than that have sent so much, none of them is waited for: that is a flood."""
_ALLOWED_BYTES = 512 * 2**10
"""Bytes allowed to a connection beyond those that its calls explain."""
_ALLOWED_IN_ATTACK_BYTES = 96 * 2**10
"""`_ALLOWED_BYTES` during floods, for addresses that flooded or that no admitted client came from:
gRPC core takes 0.4 s of CPU for a MiB of headers."""
_MAX_EXCESS_BYTES = 2**20
"""Bytes beyond their allowances that all strangers together may send. More is a flood from many
addresses."""
_ALLOWED_LET_IN_BYTES = 64 * 2**20
"""`_ALLOWED_BYTES` of an admitted client: calls that are cancelled before the event loop sees them
explain nothing."""
_ALLOWED_BYTES_PER_S = 16 * 2**10
"""Lets a load balancer check our health several times a second without end."""
_CALL_BYTES = 16 * 2**10
"""Bytes that a call explains besides its messages: the longest headers that are admitted."""
_STRANGE_CALL_BYTES = 4 * 2**10
"""Bytes charged for a stranger's call: answering it takes about as long as reading these."""
_FRAMING = 1.25
"""Bytes on the wire per byte of a message, with frames and TLS records."""
_MAX_FLOODS = 2
"""Floods from one address after which it is shut out."""
_MAX_FLOODS_SHARED = 40
"""Floods after which an address that clients also use is shut out: it may be a load balancer's."""
_MEMORY_S = 600.0
_MAX_REMEMBERED = 4096
_MAX_ORPHANS = 1024
_ORPHAN_S = 10.0
_MAX_SHUT_OUT = 64
"""Most addresses shut out at once: the kernel's filter compares each new connection with all."""


@dataclass(slots=True)
class Account:
    """The bytes that one connection's calls explain. Written by the event loop, read by the
    guard."""

    explained_bytes: float = 0.0
    num_strange_calls: int = 0
    is_stranger: bool = True
    begin_s: float = field(default_factory=time.monotonic)

    def let_in(self) -> None:
        self.is_stranger = False
        self.explained_bytes += _CALL_BYTES

    def not_let_in(self) -> None:
        """Counts a call without a key, or one that needs none."""
        self.num_strange_calls += 1

    def message_due(self) -> None:
        """Counts a whole message in advance: any part of it may arrive, even if the call ends
        first."""
        self.explained_bytes += _FRAMING * MAX_MESSAGE_BYTES

    def message_came(self, num_bytes: int) -> None:
        self.explained_bytes -= _FRAMING * (MAX_MESSAGE_BYTES - num_bytes)


@dataclass(eq=False, slots=True)
class _Connection:
    cookie: Cookie
    host: str
    peer: str
    account: Account
    over_since: int | None = None
    """The event loop's turn at which too many bytes were first seen; ``None`` while there are
    few."""


class GrpcGuard:
    """Guards one port of this process, from `start` to `stop`."""

    def __init__(
        self,
        limits: ConnectionLimits,
        *,
        cut: Callable[[str], object] = lambda reason: None,
    ) -> None:
        """``cut`` receives the reason of each connection that is ended: ``flood``, ``address`` (the
        address has too many connections) or ``room`` (another connection needed the place)."""
        self._limits = limits
        self._cut = cut
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_turns = 0
        self._is_turning = False
        # In this check: bytes that wait for the event loop's turns, and strangers' bytes that do
        # not.
        self._num_busy = 0
        self._were_many = False  # At the look before this one.
        self._num_waiting_bytes = self._num_excess_bytes = 0.0
        self._accounts: dict[str, Account] = {}  # By peer, as gRPC writes it.
        self._connections: dict[int, _Connection] = {}  # By gRPC's file descriptor.
        self._descriptors = range(0)
        self._descriptors_due_s = 0.0
        self._num_accepted: int | None = None
        self._awake_until_s = self._due_s = -inf
        self._others: dict[int, Cookie] = {}
        self._is_to_be_told = False  # Whether the kernel's filter is out of date.
        self._shut_out: dict[str, float] = {}  # By host: when its shut-out ends.
        self._floods: dict[str, tuple[float, int]] = {}  # By host: time and count of floods.
        self._flooded_s = -inf  # Time of the last flood.
        self._let_in: dict[str, float] = {}  # By host: when an admitted client was last seen.
        self._warn_of_flood = SeldomWarning(_log)
        self._warn_of_kernel = SeldomWarning(_log)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grpc-guard", daemon=True)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def account(self, peer: str) -> Account:
        """The account of the connection from ``peer``, written as by gRPC."""
        if not peer.startswith("ipv4:"):
            peer = unquote(peer)
        account = self._accounts.get(peer)
        return self._accounts.setdefault(peer, Account()) if account is None else account

    def start(self, port: int) -> None:
        """Starts the thread. Must be called in the event loop that serves the port."""
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._stopping.wait(pause_s):
            begin_s = time.thread_time()
            if self._may_sleep(time.monotonic()):
                continue
            try:
                self._look()
            except Exception:
                _log.exception("gRPC's connections cannot be looked at")
            pause_s = max(_LOOK_S, (time.thread_time() - begin_s) / _MAX_SHARE)

    def _may_sleep(self, now_s: float) -> bool:
        """Whether there is nothing to look at. gRPC does not tell of new connections, but the
        kernel counts those of all ports, which takes a tenth of a look at all descriptors."""
        before, self._num_accepted = self._num_accepted, num_accepted()
        if self._connections or self._num_accepted is None or self._num_accepted != before:
            self._awake_until_s = now_s + _AWAKE_S
        if now_s >= self._awake_until_s and now_s < self._due_s:
            return True
        self._due_s = now_s + _ASLEEP_S
        return False

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s > self._descriptors_due_s:
            self._descriptors = descriptors()
            self._descriptors_due_s = now_s + _DESCRIPTORS_S
        self._find()
        self._num_waiting_bytes = self._num_excess_bytes = 0.0
        num_busy, self._num_busy = self._num_busy, 0
        self._were_many = num_busy > _MAX_BUSY_STRANGERS
        for fd, connection in list(self._connections.items()):
            if fd in self._connections:  # It may have been ended with its address.
                self._judge(fd, connection, now_s)
        if self._num_waiting_bytes:
            self._let_turn()
        self._bound()
        self._forgive(now_s)
        self._sweep(now_s)

    def _find(self) -> None:
        """Adds new connections, and forgets those that are gone."""
        gone = self._connections.keys() | self._others.keys()
        for fd in self._descriptors:
            cookie = cookie_of(fd)
            if cookie is None:
                continue
            known = self._connections.get(fd)
            if cookie != (self._others.get(fd) if known is None else known.cookie):
                self._forget(fd)
                self._take_in(fd, cookie)
            gone.discard(fd)
        for fd in gone:
            self._forget(fd)

    def _take_in(self, fd: int, cookie: Cookie) -> None:
        found = connection_of(fd)
        if found is None or found.local_port != self._port:
            self._others[fd] = cookie
            return
        host, port = found.host, found.port
        peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self._connections[fd] = _Connection(cookie, host, peer, self.account(peer))

    def _forget(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is not None:
            self._accounts.pop(connection.peer, None)
        self._others.pop(fd, None)

    def _judge(self, fd: int, connection: _Connection, now_s: float) -> None:
        """Ends the connection if it floods."""
        acked, received = acked_and_received(fd)
        is_stranger, host = connection.account.is_stranger, connection.host
        if not is_stranger:
            _remember(self._let_in, host, now_s)
        least = _ALLOWED_IN_ATTACK_BYTES if is_stranger else _ALLOWED_LET_IN_BYTES
        unexplained = received - self._explained_bytes(connection, acked, now_s)
        self._num_busy += is_stranger and unexplained > _BUSY_BYTES
        if unexplained <= least:
            connection.over_since = None
            return
        is_unknown = is_stranger and not self._is_shared(host, now_s)
        is_suspect = is_unknown or (is_stranger and host in self._floods)
        in_attack = is_suspect and now_s - self._flooded_s < _MEMORY_S
        if not (in_attack or self._is_due(connection, unexplained)):
            self._num_waiting_bytes += unexplained
            return
        if is_unknown:
            self._num_excess_bytes += unexplained - least
            if self._num_excess_bytes > _MAX_EXCESS_BYTES:
                self._flooded_s, in_attack = now_s, True
        if in_attack or not is_stranger or unexplained > _ALLOWED_BYTES:
            self._flooded(fd, connection, now_s)

    def _explained_bytes(self, connection: _Connection, acked: int, now_s: float) -> float:
        account = connection.account
        refilled = _ALLOWED_BYTES_PER_S * (now_s - account.begin_s)
        if account.is_stranger:
            return refilled - _STRANGE_CALL_BYTES * account.num_strange_calls
        # Clients that read an answer also send frames about it, which are shorter than our bytes.
        return refilled + account.explained_bytes + acked

    def _is_due(self, connection: _Connection, unexplained: float) -> bool:
        """Whether the connection is judged now: the event loop must know of its calls by now, or
        too many bytes or strangers wait for the loop."""
        if connection.over_since is None:
            connection.over_since = self._num_turns
        num_turns = self._num_turns - connection.over_since
        is_too_much = self._num_waiting_bytes + unexplained > _MAX_WAITING_BYTES
        are_many = self._were_many or self._num_busy > _MAX_BUSY_STRANGERS
        is_one_of_many = are_many and connection.account.is_stranger
        return num_turns >= _NUM_TURNS or is_too_much or is_one_of_many

    def _let_turn(self) -> None:
        """Asks the event loop to count its next turn."""
        if self._loop is not None and not self._is_turning:
            self._is_turning = True
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._turned)

    def _turned(self) -> None:
        self._num_turns += 1
        self._is_turning = False

    def _is_shared(self, host: str, now_s: float) -> bool:
        """Whether an admitted client came from ``host`` recently."""
        return now_s - self._let_in.get(host, -inf) < _MEMORY_S

    def _flooded(self, fd: int, connection: _Connection, now_s: float) -> None:
        host = connection.host
        self._end(fd, connection, "flood")
        last_s, num = self._floods.pop(host, (now_s, 0))
        num = num + 1 if now_s - last_s < _MEMORY_S else 1
        _remember(self._floods, host, (now_s, num))
        self._flooded_s = now_s
        most = _MAX_FLOODS_SHARED if self._is_shared(host, now_s) else _MAX_FLOODS
        if self._limits.shut_out_s and num >= most:
            self._shut_out_host(host, until_s=now_s + self._limits.shut_out_s)

    def _shut_out_host(self, host: str, *, until_s: float) -> None:
        if host not in self._shut_out:
            self._warn_of_flood("%s floods gRPC: shut out for %g s", host, self._limits.shut_out_s)
        self._shut_out[host] = until_s
        while len(self._shut_out) > _MAX_SHUT_OUT:
            del self._shut_out[min(self._shut_out, key=self._shut_out.__getitem__)]
        self._tell_kernel()  # Before they can reconnect.
        for fd, each in list(self._connections.items()):
            if each.host == host and each.account.is_stranger:
                self._end(fd, each, "flood")

    def _forgive(self, now_s: float) -> None:
        over = [host for host, until_s in self._shut_out.items() if until_s < now_s]
        for host in over:
            del self._shut_out[host]
        if over or self._is_to_be_told:
            self._tell_kernel()

    def _tell_kernel(self) -> None:
        """Attaches the filter to each listening socket; if that fails, tries again at the next
        check."""
        self._is_to_be_told = False
        for fd in descriptors():
            cookie = cookie_of(fd)
            if cookie is None or listening_port(fd) != self._port:
                continue
            try:
                with borrowed(fd, cookie) as listener:
                    shut_out(listener, self._shut_out)
            except OSError as error:
                self._warn_of_kernel("the kernel shuts out no address: %s", error)
                self._is_to_be_told = True  # At the next check.

    def _bound(self) -> None:
        """Ends connections above the limits: an address's newest ones, and strangers, the oldest of
        the address that has most of them."""
        limits = self._limits
        is_full = len(self._connections) > limits.max_connections
        if limits.max_connections_per_address is None and not is_full:
            return
        oldest = sorted(self._connections.items(), key=lambda item: item[1].account.begin_s)
        num_of: Counter[str] = Counter()
        for fd, each in oldest:
            num_of[each.host] += 1
            if num_of[each.host] > (limits.max_connections_per_address or inf):
                self._end(fd, each, "address")
        num_excess = max(0, len(self._connections) - limits.max_connections)
        newer: Counter[str] = Counter()
        strangers = list[tuple[int, int, _Connection]]()
        for fd, each in reversed(oldest):
            if fd in self._connections and each.account.is_stranger:
                strangers.append((newer[each.host], fd, each))
                newer[each.host] += 1
        strangers.sort(key=lambda item: (-item[0], item[2].account.begin_s))
        for _, fd, each in strangers[:num_excess]:
            self._end(fd, each, "room")

    def _sweep(self, now_s: float) -> None:
        """Forgets accounts that were made for calls read after their connection had ended."""
        if len(self._accounts) <= len(self._connections) + _MAX_ORPHANS:
            return
        peers = {each.peer for each in self._connections.values()}
        for peer, account in list(self._accounts.items()):
            if peer not in peers and now_s - account.begin_s > _ORPHAN_S:
                self._accounts.pop(peer, None)

    def _end(self, fd: int, connection: _Connection, reason: str) -> None:
        with contextlib.suppress(OSError), borrowed(fd, connection.cookie) as own:
            end(own)
        self._cut(reason)
        self._forget(fd)
        self._others[fd] = connection.cookie  # Until gRPC has closed it.


def _remember(memory: dict[str, T], host: str, what: T) -> None:
    memory.pop(host, None)
    memory[host] = what
    if len(memory) > _MAX_REMEMBERED:
        del memory[next(iter(memory))]  # The oldest entry.
