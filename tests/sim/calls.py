"""Calls between processes as gRPC has them, over connections that can break.

A *pipe* carries the messages of one call in one direction: in order and whole as long as the
connection stands, each after a latency of its own, no more unread ones than its window allows.
Different calls overtake each other. What is sent into a cut waits until that heals, as TCP would
send it again and again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.network import Network


Metadata = tuple[tuple[str, str], ...]


class RpcError(grpc.aio.AioRpcError):
    """As gRPC raises it at the caller."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Pipe:
    """One direction of one call. ``from_server`` says which."""

    def __init__(self, call: "Call", source: str, target: str, *, from_server: bool) -> None:
        self.call = call
        self.source, self.target = source, target
        self.name = f"{call.name} {source}>{target}"
        self.from_server = from_server
        self._network: Network = call.network
        self._under_way: deque[Message | None] = deque()  # None is the end.
        self._num_held = 0  # Of those under way: would have arrived, but for a cut.
        self._last_arrival_s = 0.0
        self._unread: deque[Message] = deque()
        self._has_ended = False
        self._changed = asyncio.Event()

    @property
    def num_unread(self) -> int:
        return len(self._under_way) + len(self._unread)

    async def write(self, message: Message) -> None:
        while self.num_unread >= self._network.config.window and self.call.is_open:
            self._changed.clear()
            await self._changed.wait()
        self.put(message)

    def put(self, message: Message | None) -> None:
        """Sends without regard to the window; ``None`` ends the stream."""
        if not self._network.can_send(self.call, from_server=self.from_server):
            return
        if message is not None:
            message = _copy(message)
        self._under_way.append(message)
        arrival_s = self._network.arrival_s(self.source, self.target)
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        self._network.loop.call_at(self._last_arrival_s, self._arrive)

    def inject(self, message: Message) -> None:
        """Makes ``message`` arrive now, though nobody sent it."""
        self._accept(message)

    def release(self) -> None:
        """The cut is healed: what it held back arrives soon."""
        num_held, self._num_held = self._num_held, 0
        for _ in range(num_held):
            arrival_s = self._network.arrival_s(self.source, self.target, late=True)
            self._last_arrival_s = max(self._last_arrival_s, arrival_s)
            self._network.loop.call_at(self._last_arrival_s, self._arrive)

    async def read(self) -> Message | None:
        """The next message; None at the end, of whatever kind."""
        while not self._unread:
            if self._has_ended or not self.call.is_open:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._unread.popleft()
        self._changed.set()
        return message

    def wake(self) -> None:
        self._changed.set()

    def _arrive(self) -> None:
        if self._network.is_cut(self.source, self.target):
            self._num_held += 1
            self._network.hold(self)
            return
        message = self._under_way.popleft()
        if message is None:
            self._has_ended = True
            self._changed.set()
            self.call.stream_ended(from_server=self.from_server)
            return
        for arriving in self._network.tamper(self, message):
            self._accept(arriving)

    def _accept(self, message: Message) -> None:
        if self._has_ended or not self.call.is_open:
            return
        self._network.trace(self.name, message)
        self._unread.append(message)
        self._changed.set()


class Call:
    """One call, seen by its caller as `grpc.aio` shows it, by its server as `ServerContext`."""

    def __init__(self, connection: "Connection", method: str) -> None:
        self.network: Network = connection.network
        self.connection = connection
        self.name: str = f"{connection.number}.{method}"
        self.is_open = True
        self.error: RpcError | None = None
        self.down = Pipe(self, connection.client_place, connection.server_place, from_server=False)
        self.up = Pipe(self, connection.server_place, connection.client_place, from_server=True)
        self._status: RpcError | None = None  # What the server ended with, under way.
        self._handler: asyncio.Task[Any] | None = None

    def serve(self, handler: Callable[[], Any]) -> None:
        """Starts ``handler`` in the server's process, once the call has got there."""
        server = self.connection.server
        if server is None:
            return

        def begin() -> None:
            if self.is_open and not server.is_dead:
                self._handler = server.spawn(self._handle(handler))

        self.network.deliver(self.down.source, self.down.target, begin)

    async def _handle(self, handler: Callable[[], Any]) -> None:
        try:
            answer = await handler()
            if isinstance(answer, Message):
                self.up.put(answer)
            self.finish(None)
        except asyncio.CancelledError:
            self.finish(RpcError(grpc.StatusCode.CANCELLED, "the handler was cancelled"))
        except _Aborted as aborted:
            self.finish(RpcError(aborted.code, aborted.details, aborted.trailing))
        except Exception as error:
            self.network.failures.append(error)
            self.finish(RpcError(grpc.StatusCode.UNKNOWN, repr(error)))

    def finish(self, status: RpcError | None) -> None:
        """The server is done; the caller will know behind the last message."""
        self._status = status
        self.up.put(None)

    def stream_ended(self, *, from_server: bool) -> None:
        if from_server:
            self.error = self._status
            self.close()
            return
        self.close()  # The caller cancelled.
        if self._handler is not None:
            self._handler.cancel()

    def cancel(self) -> None:
        """By the caller."""
        if self.is_open and self.connection.is_open:
            self.down.put(None)

    def fail(self, error: RpcError) -> None:
        """The connection broke: both sides know, of whichever still lives."""
        if not self.is_open:
            return
        self.error = error
        self.close()
        if self._handler is not None:
            self._handler.cancel()

    def close(self) -> None:
        self.is_open = False
        self.connection.calls.pop(self, None)
        self.down.wake()
        self.up.wake()

    # The caller's side.

    async def write(self, request: Any) -> None:
        if not self.is_open:
            raise self.error or asyncio.InvalidStateError("the call is over")
        await self.down.write(request)

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (message := await self.up.read()) is not None:
                yield message
            if self.error is not None:
                raise self.error
        finally:
            self.cancel()


class _Aborted(grpc.aio.AbortError):
    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        super().__init__()
        self.code, self.details, self.trailing = code, details, trailing


class ServerContext:
    """What a handler is given, as far as ours use it."""

    def __init__(self, call: Call, *, deadline_s: float | None = None) -> None:
        self._call = call
        self._deadline_s = deadline_s

    async def write(self, message: Message) -> None:
        await self._call.up.write(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> None:
        raise _Aborted(code, details, trailing_metadata)

    def time_remaining(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self._call.network.loop.time())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self._call.down.read()) is not None:
            yield message


class Connection:
    """A channel from one process to a server, which may not be there."""

    def __init__(
        self, network: "Network", client: Process | None, client_place: str, address: str
    ) -> None:
        self.network = network
        self.number = next(network.numbers)
        self.address = address
        self.client, self.client_place = client, client_place
        listener = network.listeners.get(address)
        self.server = listener.process if listener else None
        self.service = listener.service if listener else None
        self.server_place = network.place_of(address)
        self.is_open = True
        self.calls: dict[Call, None] = {}

    def call(self, method: str) -> Call:
        call = Call(self, method)
        if not self.is_open:
            call.fail(RpcError(grpc.StatusCode.UNAVAILABLE, "the connection is closed"))
            return call
        self.calls[call] = None
        if self.server is None:  # Nobody listens: the machine says so, if it can be reached.
            refused = RpcError(grpc.StatusCode.UNAVAILABLE, f"{self.address} refused")
            here, there = self.client_place, self.server_place
            self.network.deliver(
                here, there, lambda: self.network.deliver(there, here, lambda: call.fail(refused))
            )
        return call

    def reset(self, reason: str) -> None:
        """Both sides find the connection broken, if they have not closed it."""
        if self not in self.network.connections:
            return
        self.is_open = False
        del self.network.connections[self]
        for call in tuple(self.calls):
            call.fail(RpcError(grpc.StatusCode.UNAVAILABLE, reason))

    async def unary(self, method: str, request: Message, *, timeout: float) -> Any:
        call = self.call(method)
        service = self.service
        if service is not None:
            context = ServerContext(call)
            call.serve(lambda: getattr(service, method)(request, context))
        try:
            async with asyncio.timeout(timeout):
                message = await call.up.read()
        except TimeoutError:
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, f"after {timeout} s") from None
        finally:
            call.cancel()
        if message is None:
            raise call.error or RpcError(grpc.StatusCode.INTERNAL, "no answer")
        return message

    def server_stream(
        self, method: str, request: Message, *, deadline_s: float | None = None
    ) -> Call:
        call = self.call(method)
        service = self.service
        if service is not None:
            context = ServerContext(call, deadline_s=deadline_s)
            request = _copy(request)
            call.serve(lambda: getattr(service, method)(request, context))
        return call

    def stream_stream(self, method: str) -> Call:
        call = self.call(method)
        service = self.service
        if service is not None:
            context = ServerContext(call)
            call.serve(lambda: getattr(service, method)(context.requests(), context))
        return call


def _copy(message: Message) -> Any:
    """As the other side has it: through bytes, so that nothing is shared."""
    return type(message).FromString(message.SerializeToString())
