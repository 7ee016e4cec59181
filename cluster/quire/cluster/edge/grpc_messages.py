"""Reads the messages of clients' gRPC calls, for any server of ours.

A message that cannot be decoded ends its call as INVALID_ARGUMENT; gRPC itself answers UNKNOWN with
Python's text of the decoder's exception. A message that does not arrive ends its call as
DEADLINE_EXCEEDED; gRPC itself waits. All messages are counted in their connection's `Account`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quire.cluster.edge.grpc_errors import Context, refuse
from quire.cluster.features.guard.grpc_guard import Account
from quire.worker.request.errors import InvalidRequest

Handler = Any  # A grpc.RpcMethodHandler; only type checkers see it as generic.


class Malformed(InvalidRequest):
    """A message that cannot be decoded, or a missing one. Raised where the message is read, and
    sent once the handler has ended: gRPC loses a status that is sent at the same time as a
    message."""


class GrpcMessages(grpc.aio.ServerInterceptor):
    """Reads messages instead of gRPC, which calls a handler only once the message has arrived.

    Args:
        account_of: The account of a peer's connection.
        open_services: Services that need no key; their calls therefore explain no bytes.
        timeout_s: Longest wait for the message of a call that has one.
    """

    def __init__(
        self,
        *,
        account_of: Callable[[str], Account] = lambda peer: Account(),
        open_services: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        self._account_of = account_of
        self._open = tuple(f"/{service}/" for service in open_services)
        self._timeout_s = timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        is_open = details.method.startswith(self._open)
        answers = "stream" if handler.response_streaming else "unary"
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{answers}"
        behavior = getattr(handler, kind)

        async def given(context: Context) -> Any:
            """The request, or the stream of requests, that the behavior receives."""
            account = self._account_of(context.peer())
            if is_open:
                account.not_let_in()
            else:
                account.let_in()
            reader = _Reader(handler.request_deserializer, account, context)
            if handler.request_streaming:
                return reader.all()
            return await reader.only(self._timeout_s)

        make = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        return make(_calling(behavior, given), None, handler.response_serializer)


def _calling(
    behavior: Callable[..., Any], given: Callable[[Context], Awaitable[Any]]
) -> Callable[..., Any]:
    """``behavior`` as a handler that reads its request first; a stream stays a stream."""
    if inspect.isasyncgenfunction(behavior):

        async def stream(_: object, context: Context) -> AsyncIterator[Any]:
            try:
                async with aclosing(behavior(await given(context), context)) as responses:
                    async for response in responses:
                        yield response
            except Malformed as error:
                await _refuse(context, error)

        return stream

    async def answer(_: object, context: Context) -> Any:
        try:
            return await behavior(await given(context), context)
        except Malformed as error:
            await _refuse(context, error)

    return answer


async def _refuse(context: Context, error: Malformed) -> None:
    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED", str(error))


@dataclass(slots=True)
class _Reader:
    decode: Callable[[bytes], Any]
    account: Account
    context: Context

    async def only(self, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._read()
        except TimeoutError:
            await refuse(
                self.context,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "MESSAGE_TIMEOUT",
                f"the request's message did not come within {timeout_s:g} s",
            )
        if message is grpc.aio.EOF:
            raise Malformed("the request has no message")
        return message

    async def all(self) -> AsyncIterator[Any]:
        while (message := await self._read()) is not grpc.aio.EOF:
            yield message

    async def _read(self) -> Any:
        self.account.message_due()
        data: Any = await self.context.read()
        if data is grpc.aio.EOF:
            self.account.message_came(0)
            return data
        self.account.message_came(len(data))
        try:
            return self.decode(data)
        except DecodeError:
            raise Malformed("the request is not a message of this method's type") from None
