"""Requests over gRPC that are not the protocol's: INVALID_ARGUMENT, on any server of ours.

gRPC itself answers UNKNOWN, with the decoder's exception as Python shows it.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quire.cluster.edge.grpc_errors import Context, refuse

Handler = Any  # A grpc.RpcMethodHandler, which is generic for type checkers only.

_MALFORMED = object()


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Ends a call whose request cannot be decoded before its servicer sees it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = handler.request_deserializer
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                guarded = _guarded(behavior, takes_stream=handler.request_streaming)
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(guarded, partial(_decoded, decode), handler.response_serializer)
        return handler


def _decoded(decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return decode(data)
    except DecodeError:
        # An exception raised here would never reach us.
        return _MALFORMED


def _guarded(behavior: Callable[..., Any], *, takes_stream: bool) -> Callable[..., Any]:
    """``behavior``, of the same kind, for well-formed requests only."""

    async def checked(request: Any, context: Context) -> Any:
        if takes_stream:
            return _checked_all(request, context)
        if request is _MALFORMED:
            await _abort(context)
        return request

    if inspect.isasyncgenfunction(behavior):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior(await checked(request, context), context)) as responses:
                async for response in responses:
                    yield response

        return stream

    async def answer(request: Any, context: Context) -> Any:
        return await behavior(await checked(request, context), context)

    return answer


async def _checked_all(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _MALFORMED:
            await _abort(context)
        yield request


async def _abort(context: Context) -> None:
    await refuse(
        context,
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED",
        "the request is not a message of this method's type",
    )
