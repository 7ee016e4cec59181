"""The `Inference` service that clients call, with health checking and reflection beside it.

Errors carry the status codes that ``inference.proto`` promises. What nobody foresaw is logged under
an incident's number and reaches the client as INTERNAL with that number, without its innards.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from math import ceil

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.cluster.auth import ApiKeys, GrpcAuth
from quire.cluster.errors import (
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    Quarantined,
    Unavailable,
)
from quire.cluster.gateway.explanations import explain
from quire.cluster.gateway.generation import Chat, GenerationRequest
from quire.cluster.gateway.service import Gateway
from quire.cluster.http.streams import sane_client_id
from quire.cluster.wire import params_from_proto
from quire.router.errors import UnknownDecision
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.errors import InvalidRequest, QueueFull

_log = logging.getLogger(__name__)

_MAX_DETAILS_BYTES = 2000

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

Context = grpc.aio.ServicerContext[object, object]

_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    UnknownDecision: grpc.StatusCode.NOT_FOUND,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Quarantined: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """`Gateway` over gRPC."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    # Writes instead of yielding: a cancelled call then raises inside the handler at once, where a
    # suspended generator would wait for the garbage collector.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with _statuses(context):
            generation = await self._gateway.prepare(
                GenerationRequest(
                    prompt=_prompt(request),
                    params=params_from_proto(request.sampling),
                    model=request.model,
                    cache_salt=request.cache_salt,
                    client_id=_client_id(context),
                    explain_routing=request.explain_routing,
                    priority=request.priority,
                    timeout_s=_remaining_s(context),
                )
            )
            async with aclosing(self._gateway.stream([generation])) as chunks:
                async for chunk in chunks:
                    await context.write(chunk)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        response = pb.TokenizeResponse()
        async with _statuses(context):
            self._gateway.check_model(request.model)
            card = await self._gateway.card()
            token_ids = await self._gateway.tokenize(
                _prompt(request), add_special_tokens=not request.no_special_tokens
            )
            response.token_ids.extend(token_ids)
            response.max_model_len = card.max_model_len
        return response

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        response = pb.DetokenizeResponse()
        async with _statuses(context):
            self._gateway.check_model(request.model)
            response.text = await self._gateway.detokenize(
                request.token_ids, skip_special_tokens=request.skip_special_tokens
            )
        return response

    async def ExplainRouting(
        self, request: pb.ExplainRoutingRequest, context: Context
    ) -> pb.ExplainRoutingResponse:
        response = pb.ExplainRoutingResponse()
        async with _statuses(context):
            # In a thread, since thousands of candidates take long.
            response = await asyncio.to_thread(explain, self._gateway.table, request)
        return response


def build_grpc_server(gateway: Gateway, *, keys: ApiKeys | None = None) -> grpc.aio.Server:
    """A server without ports, for the caller to add them, start it and stop it with grace.

    Its health is SERVING while at least one replica group takes requests. ``keys``: what clients
    of `Inference` must show; without them, everyone is let in.
    """
    server = grpc.aio.server(interceptors=[GrpcAuth(keys, service=SERVICE)] if keys else [])
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(gateway), server)
    health_pb2_grpc.add_HealthServicer_to_server(_GatewayHealth(gateway), server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


class _GatewayHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1, following the gateway's readiness."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._changed = asyncio.Event()
        self._on_change()
        gateway.watch(self._on_change)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Ends when the gateway drains: who watches would keep it until the grace is over."""
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        shown = None
        while True:
            changed = self._changed
            status = self._server_status.get(request.service, unknown)
            if status != shown:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                shown = status
            if self._gateway.is_draining:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")
            await changed.wait()

    def _on_change(self) -> None:
        self._server_status = dict.fromkeys(("", SERVICE), self._status())
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        is_ready = self._gateway.is_ready
        response = health_pb2.HealthCheckResponse
        return response.SERVING if is_ready else response.NOT_SERVING


@asynccontextmanager
async def _statuses(context: Context) -> AsyncIterator[None]:
    """Turns what is raised inside into a gRPC status."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        for kind, code in _CODES.items():
            if isinstance(error, kind):
                await context.abort(code, _details(error), _trailing_metadata(error))
        incident = secrets.token_hex(4)
        _log.exception("incident %s", incident)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error, incident {incident}")


def _client_id(context: Context) -> str:
    """What the client calls the request, in ``x-request-id`` as over HTTP."""
    for name, value in context.invocation_metadata() or ():
        if name == "x-request-id" and isinstance(value, str):
            return sane_client_id(value)
    return ""


def _remaining_s(context: Context) -> float | None:
    """Until the call's deadline, where it has one. Raises DeadlineExceeded: it has passed."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the call came after its deadline")
    return remaining_s


def _details(error: Exception) -> str:
    """Clients refuse trailers above 8 KB, and with them the status; gRPC writes %XX for a byte that
    is not printable."""
    message = str(error).encode()
    if len(message) <= _MAX_DETAILS_BYTES:
        return str(error)
    return message[:_MAX_DETAILS_BYTES].decode(errors="ignore") + " …"


def _trailing_metadata(error: Exception) -> tuple[tuple[str, str], ...]:
    """When to try again: for those who read HTTP's header, and for gRPC's own retries (A6)."""
    if not isinstance(error, Overloaded):
        return ()
    pushback_ms = round(error.retry_after_s * 1000)
    return (
        ("retry-after", str(ceil(error.retry_after_s))),
        ("grpc-retry-pushback-ms", str(pushback_ms)),
    )


def _prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> str | list[int] | Chat:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt is missing: set text, token_ids or chat")
    if kind == "chat":
        turns = request.chat.messages
        return Chat(messages=[{"role": turn.role, "content": turn.content} for turn in turns])
    if kind == "token_ids" and isinstance(request, pb.GenerateRequest):
        return list(request.token_ids.ids)
    return request.text
