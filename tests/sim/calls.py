"""gRPC-like calls between simulated processes, over connections that can break.

Each call has a `Pipe` in either direction. Different calls overtake each other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from tests.sim.loop import Process
from tests.sim.pipes import Pipe, copied

if TYPE_CHECKING:
    from tests.sim.network import Network


Metadata = tuple[tuple[str, str], ...]


class RpcError(grpc.aio.AioRpcError):
    """The error that gRPC raises at the caller."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Call:
    """A call with the caller's interface of `grpc.aio`; its server sees a `ServerContext`."""

    def __init__(self, connection: "Connection", method: str) -> None:
        self.network: Network = connection.network
        self.connection = connection
        self.name: str = f"{connection.number}.{method}"
        self.is_open = True
        self.error: RpcError | None = None
        self.down = Pipe(self, connection.client_place, connection.server_place, from_server=False)
        self.up = Pipe(self, connection.server_place, connection.client_place, from_server=True)
        self._status: RpcError | None = None  # The server's status, under way.
        self._handler: asyncio.Task[Any] | None = None

    def serve(self, handler: Callable[[], Any]) -> None:
        """Starts ``handler`` in the server's process once the call has arrived there."""
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
        """Ends the call for the server; the caller receives the status after the last message."""
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
        """The caller cancels the call."""
        if self.is_open and self.connection.is_open:
            self.down.put(None)

    def fail(self, error: RpcError) -> None:
        """Ends the call: the caller receives the error, and the handler is cancelled."""
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
    """The part of gRPC's handler context that our handlers use."""

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
        if self.server is None:  # Nobody listens: a reachable machine refuses.
            refused = RpcError(grpc.StatusCode.UNAVAILABLE, f"{self.address} refused")
            here, there = self.client_place, self.server_place
            self.network.deliver(
                here, there, lambda: self.network.deliver(there, here, lambda: call.fail(refused))
            )
        return call

    def reset(self, reason: str) -> None:
        """Breaks the connection for both sides, unless it was closed."""
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
            request = copied(request)
            call.serve(lambda: getattr(service, method)(request, context))
        return call

    def stream_stream(self, method: str) -> Call:
        call = self.call(method)
        service = self.service
        if service is not None:
            context = ServerContext(call)
            call.serve(lambda: getattr(service, method)(context.requests(), context))
        return call
