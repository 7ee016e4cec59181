"""Begins the `Timeline` of each call over HTTP and gRPC, and passes it on when the call has ended.

Health checks and scrapes of metrics have no timeline.
"""

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.cluster.edge import grpc_calls
from quire.cluster.edge.auth import grpc_caller
from quire.cluster.edge.grpc_errors import Context
from quire.cluster.edge.streams import client_id
from quire.cluster.features.tracing.tracing import traceparent
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.timeline import Timeline

Handler = Any  # A grpc.RpcMethodHandler; only type checkers see it as generic.
Begin = Callable[[Timeline, Sequence[str], Sequence[str]], object]
"""Called for each arriving call with its timeline and the values of its headers ``traceparent`` and
``tracestate``."""
Finish = Callable[[Timeline], object]

_UNTOLD_PATHS = ("/health", "/ping", "/metrics")
_STATUSES = {code.value[0]: code.name for code in grpc.StatusCode}


class HttpCalls:
    """ASGI middleware. It wraps the middleware that refuses calls, so that those are recorded
    too."""

    def __init__(
        self, app: ASGIApp, *, begin: Begin, finish: Finish, paths: Iterable[str] = ()
    ) -> None:
        """``paths``: the known paths, in the form that routes have."""
        self._app = app
        self._begin = begin
        self._finish = finish
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTOLD_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = Timeline(
            method=scope["method"],
            path=scope["path"],
            endpoint=scope["path"] if scope["path"] in self._paths else "other",
            client=(scope.get("client") or ("",))[0],
            client_id=client_id(headers),
            server=scope.get("server"),
        )
        self._begin(call, headers.getlist("traceparent"), headers.getlist("tracestate"))

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = str(message["status"])
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                call.is_stream = headers.get("content-type", "").startswith("text/event-stream")
                # Refused clients receive an id too, so that operators can find the call in the log.
                call.request_id = call.request_id or secrets.token_hex(12)
                headers.setdefault("X-Request-Id", call.request_id)
                if call.trace_id:  # As in drafts of Trace Context level 2.
                    headers["traceresponse"] = traceparent(
                        call.trace_id, call.span_id, is_sampled=call.is_sampled
                    )
            await send(message)

        with ended(call, self._finish):
            try:
                await self._app(scope, receive, send_noting)
            finally:
                caller = scope.get("state", {}).get("caller")
                if caller is not None:
                    call.tenant, call.key_name = caller.tenant, caller.key_name
                call.status = call.status or "499"  # No answer was sent: the client disconnected.


class GrpcCalls(grpc.aio.ServerInterceptor):
    """gRPC's counterpart of `HttpCalls`. It runs before interceptors that refuse calls."""

    def __init__(
        self, *, begin: Begin, finish: Finish, untold_services: Iterable[str] = ()
    ) -> None:
        self._begin = begin
        self._finish = finish
        self._untold = tuple(f"/{service}/" for service in untold_services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(details)
        if handler is None or details.method.startswith(self._untold):
            return handler
        asks = "stream" if handler.request_streaming else "unary"
        answers = "stream" if handler.response_streaming else "unary"
        kind = f"{asks}_{answers}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        told = self._told(getattr(handler, kind), details.method)
        return make(told, handler.request_deserializer, handler.response_serializer)

    def _told(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        """``behavior`` with a timeline around it; a stream stays a stream."""
        if inspect.isasyncgenfunction(behavior):

            async def stream(request: object, context: Context) -> AsyncIterator[Any]:
                with self._call(method, context, is_stream=True):
                    async with aclosing(behavior(request, context)) as responses:
                        async for response in responses:
                            yield response

            return stream

        async def answer(request: object, context: Context) -> Any:
            with self._call(method, context, is_stream=False):
                return await behavior(request, context)

        return answer

    @contextmanager
    def _call(self, method: str, context: Context, *, is_stream: bool) -> Iterator[None]:
        call = Timeline(
            method="gRPC",
            path=method,
            endpoint=method,
            client=_host(context.peer()),
            client_id=grpc_calls.client_id(context),
            is_stream=is_stream,
        )
        self._begin(
            call,
            grpc_calls.header(context, "traceparent"),
            grpc_calls.header(context, "tracestate"),
        )
        caller = grpc_caller()
        call.tenant, call.key_name = caller.tenant, caller.key_name
        with ended(call, self._finish):
            try:
                yield
            except asyncio.CancelledError:
                left_s = context.time_remaining()
                is_late = left_s is not None and left_s <= 0
                call.status = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
                raise
            finally:
                call.status = call.status or _STATUSES.get(_code(context), "OK")


@contextmanager
def ended(call: Timeline, finish: Finish) -> Iterator[None]:
    """Ends ``call`` when the block ends, and passes it to ``finish``."""
    token = timeline.begin(call)
    try:
        yield
    finally:
        call.end()
        finish(call)
        timeline.leave(token)


def _code(context: Context) -> int:
    code: Any = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return number or 0


def _host(peer: str) -> str:
    """The address part of ``ipv4:127.0.0.1:40000`` or ``ipv6:%5B::1%5D:40000``."""
    return peer.partition(":")[2].rpartition(":")[0].replace("%5B", "").replace("%5D", "")
