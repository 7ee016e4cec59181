"""The simulated network between processes, with its faults.

A *place* is where processes run; faults lie between places. Messages sent into a cut arrive once it
heals; after ``tcp_timeout_s`` the connection breaks instead. A killed process resets its
connections. A lost machine does not, so its peers must find out by themselves.

Beyond a network's faults, a *tamper* may lose, repeat, exchange or bring back messages.
"""

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from tests.sim.calls import Call, Connection, RpcError
from tests.sim.loop import Process, SimLoop
from tests.sim.pipes import Pipe

Trace = Callable[[str, Message | None], None]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    min_latency_s: float = 0.0002
    max_latency_s: float = 0.003
    """Upper bound of a message's latency."""
    retransmit_s: float = 0.2
    """Upper bound of the extra delay of held-back messages, once a cut is healed."""
    tcp_timeout_s: float = 60.0
    """Seconds without any delivery after which a connection breaks."""
    window: int = 64
    """Number of messages of a call that may be under way or unread before the sender must wait."""


class Tamper(Protocol):
    def __call__(self, pipe: Pipe, message: Message) -> list[Message]:
        """The messages that arrive in place of ``message``."""


class GroupLinkOver:
    """`quire.cluster.links.group_link.GroupLink` over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def Describe(self, request: Message, *, timeout: float) -> Any:
        return await self._connection.unary("Describe", request, timeout=timeout)

    def Attach(self) -> Call:
        return self._connection.stream_stream("Attach")

    def Events(self, request: Message) -> Call:
        return self._connection.server_stream("Events", request)

    async def HoldAdapter(self, request: Message, *, timeout: float) -> Any:
        return await self._connection.unary("HoldAdapter", request, timeout=timeout)

    def ReadAdapter(self, request: Message) -> Call:
        return self._connection.server_stream("ReadAdapter", request)

    async def Blocks(self, request: Message, *, timeout: float) -> Any:
        return await self._connection.unary("Blocks", request, timeout=timeout)

    async def Warm(self, request: Message, *, timeout: float) -> Any:
        return await self._connection.unary("Warm", request, timeout=timeout)

    async def WriteAdapter(self, request_iterator: Any, *, timeout: float) -> Any:
        raise NotImplementedError  # All groups share one store.


@dataclass(frozen=True)
class _Listener:
    process: Process
    service: Any


class Network:
    """All connections, and the cuts and latencies between places."""

    def __init__(
        self, loop: SimLoop, rng: random.Random, *, config: NetworkConfig, trace: Trace
    ) -> None:
        self.loop = loop
        self.config = config
        self.trace = trace
        self.tamper: Tamper = lambda pipe, message: [message]
        self.listeners: dict[str, _Listener] = {}
        self.connections: dict[Connection, None] = {}
        self.failures: list[Exception] = []
        """Unexpected exceptions of handlers."""
        self.numbers = itertools.count()
        self.slow_places: dict[str, float] = {}
        """Seconds added to the latency of messages from and to a place, by place."""
        self._rng = rng
        self._cuts: dict[tuple[str, str], int] = {}
        self._held: dict[Pipe, float] = {}  # Since, in s.
        self._waiting: list[tuple[str, str, Callable[[], None]]] = []

    @staticmethod
    def place_of(address: str) -> str:
        return address.split(":")[0]

    def listen(self, address: str, process: Process, service: Any) -> None:
        self.listeners[address] = _Listener(process, service)

    @contextlib.asynccontextmanager
    async def connect(
        self, address: str, *, client: Process | None, place: str
    ) -> AsyncIterator[Connection]:
        connection = Connection(self, client, place, address)
        self.connections[connection] = None
        try:
            yield connection
        finally:
            self.close(connection)

    def close(self, connection: Connection) -> None:
        """Closes a connection for its client at once, for the server when the message arrives."""
        if not connection.is_open or (connection.client and connection.client.is_dead):
            return
        connection.is_open = False
        self.deliver(
            connection.client_place,
            connection.server_place,
            lambda: self._closed(connection),
        )

    def _closed(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        closed = RpcError(grpc.StatusCode.CANCELLED, "the channel is closed")
        for call in tuple(connection.calls):
            call.fail(closed)

    def kill(self, process: Process, *, resets: bool) -> None:
        """Ends ``process``. Its connections are reset, or without ``resets`` time out."""
        process.kill()
        for address, listener in tuple(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for connection in tuple(self.connections):
            if process not in (connection.client, connection.server):
                continue
            ends = connection.client_place, connection.server_place
            source, target = ends if process is connection.client else ends[::-1]
            if resets:
                self.deliver(source, target, self._resetting(connection, f"{process.name} is gone"))
            else:
                self.loop.call_later(
                    self.config.tcp_timeout_s, self._resetting(connection, "no acknowledgement")
                )

    def _resetting(self, connection: Connection, reason: str) -> Callable[[], None]:
        return lambda: connection.reset(reason)

    def cut(self, source: str, target: str) -> None:
        """Blocks messages from one place to the other, until `heal` was called as often."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        self._cuts[source, target] -= 1
        if self.is_cut(source, target):
            return
        for pipe in [pipe for pipe in self._held if (pipe.source, pipe.target) == (source, target)]:
            del self._held[pipe]
            pipe.release()
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self.deliver(*entry)

    def is_cut(self, source: str, target: str) -> bool:
        return self._cuts.get((source, target), 0) > 0

    def hold(self, pipe: Pipe) -> None:
        """Notes that a cut holds back messages of ``pipe``; breaks its connection on timeout."""
        if pipe in self._held:
            return
        since_s = self._held[pipe] = self.loop.time()

        def give_up() -> None:
            if self._held.get(pipe) == since_s:
                del self._held[pipe]
                pipe.call.connection.reset("no acknowledgement")

        self.loop.call_later(self.config.tcp_timeout_s, give_up)

    def deliver(self, source: str, target: str, function: Callable[[], None]) -> None:
        """Runs ``function`` once a message from ``source`` would have arrived at ``target``."""
        arrival_s = self.arrival_s(source, target)
        self.loop.call_at(arrival_s, self._deliver, source, target, function)

    def _deliver(self, source: str, target: str, function: Callable[[], None]) -> None:
        if self.is_cut(source, target):
            self._waiting.append((source, target, function))
        else:
            function()

    def arrival_s(self, source: str, target: str, *, late: bool = False) -> float:
        config = self.config
        latency_s = self._rng.uniform(config.min_latency_s, config.max_latency_s)
        if self.slow_places:
            latency_s += self.slow_places.get(source, 0.0) + self.slow_places.get(target, 0.0)
        if late:
            latency_s += self._rng.uniform(0, config.retransmit_s)
        return self.loop.time() + latency_s

    def can_send(self, call: Call, *, from_server: bool) -> bool:
        connection = call.connection
        sender = connection.server if from_server else connection.client
        return call.is_open and not (sender is not None and sender.is_dead)
