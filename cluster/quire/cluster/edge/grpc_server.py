"""The `Inference` service that clients call, with `Admin`, health checking and reflection.

Errors carry the status codes documented in ``inference.proto``, and the details of `grpc_errors`.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from quire.cluster.dialects.tools import check_tools
from quire.cluster.edge.access import Access, allows, rpc_access
from quire.cluster.edge.admin_grpc import AdminService
from quire.cluster.edge.auth import ApiKeys, GrpcAuth, grpc_caller
from quire.cluster.edge.call_records import GrpcCalls
from quire.cluster.edge.grpc_calls import GrpcService, check_lists, client_id, held, remaining_s
from quire.cluster.edge.grpc_errors import Context, statuses
from quire.cluster.edge.grpc_format import response_of
from quire.cluster.edge.grpc_messages import GrpcMessages
from quire.cluster.edge.reflection import V1, V1ALPHA, add_reflection
from quire.cluster.features.embeddings.embed import Ask, best, embed, rank
from quire.cluster.features.guard.grpc_guard import MAX_MESSAGE_BYTES, Account, GrpcGuard
from quire.cluster.features.guard.limits import GRPC_CONNECTION_AGE_S, ConnectionLimits
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.service import ModelService
from quire.cluster.seams import Feature
from quire.cluster.wire import params_from_proto
from quire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import MAX_MESSAGES, Chat, Prompt, Request, Text, Tokens

_SPARE_CONNECTIONS = 64
_PIECE_TOKENS = 2**16
_MAX_JSON_CHARS = 2**16
"""Longest JSON text of a chat template's variables, or of a message's other fields."""
_MAX_TOOLS_CHARS = 2**20

_INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
SERVICE = _INFERENCE.full_name
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_OPEN: Mapping[str, ServiceDescriptor] = {
    health.SERVICE_NAME: health_pb2.DESCRIPTOR.services_by_name["Health"],
    V1: _REFLECTION,
    V1ALPHA: _REFLECTION,
}
"""Services of libraries, by name. They need no key."""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The models of a gateway, over gRPC."""

    def __init__(self, models: Models) -> None:
        self._models = models

    # Handlers write instead of yielding: a cancelled call then raises inside the handler at once,
    # while a suspended generator would wait for the garbage collector.
    @allows(Access.KEY)
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with statuses(context, request):
            caller = grpc_caller()
            with held(request, self._models, caller.tenant):
                check_lists(request.sampling)
                model = self._models.named(request.model)
                prepared = await model.prepare(
                    Request(
                        prompt=_prompt(request),
                        sampling=params_from_proto(request.sampling),
                        cache_salt=request.cache_salt,
                        tenant=caller.tenant,
                        key_name=caller.key_name,
                        client_id=client_id(context),
                        explain_routing=request.explain_routing,
                        cache_key=request.cache_key,
                        keep_s=request.keep_s,
                        priority=request.priority,
                        timeout_s=remaining_s(context),
                    )
                )
            request.Clear()  # Frees the prompt: it is token ids now.
            await model.run(
                [prepared],
                lambda chunk: context.write(response_of(chunk, with_loads=caller.sees is None)),
            )

    @allows(Access.KEY)
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        response = pb.EmbedResponse()
        async with statuses(context, request):
            ask = self._ask(request, context)
            with held(request, self._models, ask.tenant):
                model = self._models.named(request.model)
                prompts = [_input(each) for each in request.inputs]
                made = await embed(model, prompts, ask, dimensions=request.dimensions)
            for each in made:
                embedding = response.embeddings.add(
                    num_prompt_tokens=each.num_prompt_tokens,
                    num_cached_tokens=each.num_cached_tokens,
                )
                embedding.values.extend(each.vector_C.tolist())
        return response

    @allows(Access.KEY)
    async def Rank(self, request: pb.RankRequest, context: Context) -> pb.RankResponse:
        response = pb.RankResponse()
        async with statuses(context, request):
            ask = self._ask(request, context)
            with held(request, self._models, ask.tenant):
                model = self._models.named(request.model)
                scores, cost = await rank(model, request.query, list(request.documents), ask)
            response.num_prompt_tokens = cost.num_prompt_tokens
            response.num_cached_tokens = cost.num_cached_tokens
            for place in best(scores, request.top_n):
                response.ranked.add(index=place, score=scores[place])
        return response

    def _ask(self, request: pb.EmbedRequest | pb.RankRequest, context: Context) -> Ask:
        is_cut = request.HasField("truncate_prompt_tokens")
        caller = grpc_caller()
        return Ask(
            truncate_prompt_tokens=request.truncate_prompt_tokens if is_cut else None,
            tenant=caller.tenant,
            key_name=caller.key_name,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=remaining_s(context),
            client_id=client_id(context),
        )

    @allows(Access.KEY)
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        response = pb.TokenizeResponse()
        async with statuses(context, request):
            model = self._models.named(request.model)
            with self._metered(request, model) as tenant:
                token_ids = await model.tokenize(_prompt(request), tenant=tenant)
            card = await model.card()
            for start in range(0, len(token_ids), _PIECE_TOKENS):
                response.token_ids.extend(token_ids[start : start + _PIECE_TOKENS])
                await asyncio.sleep(0)
            response.max_model_len = card.max_model_len
        return response

    @allows(Access.KEY)
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        response = pb.DetokenizeResponse()
        async with statuses(context, request):
            model = self._models.named(request.model)
            with self._metered(request, model) as tenant:
                response.text = await model.detokenize(
                    request.token_ids,
                    skip_special_tokens=request.skip_special_tokens,
                    tenant=tenant,
                )
        return response

    @contextmanager
    def _metered(self, request: Message, model: ModelService) -> Iterator[str]:
        """Counts a call that uses no group against the limits of its tenant, which it yields, while
        the block runs."""
        caller = grpc_caller()
        with (
            model.meter.metered(caller.tenant, caller.key_name),
            held(request, self._models, caller.tenant),
        ):
            yield caller.tenant

    @allows(Access.KEY)
    async def ExplainRouting(
        self, request: pb.ExplainRoutingRequest, context: Context
    ) -> pb.ExplainRoutingResponse:
        response = pb.ExplainRoutingResponse()
        async with statuses(context, request):
            caller = grpc_caller()
            response = await self._models.explanations.answer(request, tenant=caller.sees)
        return response


def build_grpc_server(
    models: Models,
    *,
    features: Sequence[Feature],
    keys: ApiKeys | None = None,
    limits: ConnectionLimits | None = None,
    guard: GrpcGuard | None = None,
) -> grpc.aio.Server:
    """A server without ports. The caller adds them, starts it, and stops it with a grace period.

    ``features``: what adds further services.

    Its health is SERVING while at least one replica group takes requests. ``keys``: the API keys
    that clients of `Inference` must show; without them, every client is let in. ``limits``: limits
    on its connections. ``guard``: guards the port that the caller will add.
    """
    limits = limits or ConnectionLimits()
    inference = GrpcService(
        descriptor=_INFERENCE,
        servicer=InferenceService(models),
        add=inference_pb2_grpc.add_InferenceServicer_to_server,
    )
    admin = GrpcService(
        descriptor=_ADMIN,
        servicer=AdminService(models),
        add=admin_pb2_grpc.add_AdminServicer_to_server,
    )
    added = [each.grpc_service(models) for each in features if each.grpc_service is not None]
    further = [service for service in added if service is not None]
    access = {f"/{name}/{each.name}": Access.OPEN for name in _OPEN for each in _OPEN[name].methods}
    for service in (inference, admin, *further):
        access |= rpc_access(service.descriptor, service.servicer)
    account_of: Callable[[str], Account] = guard.account if guard else lambda peer: Account()
    server = grpc.aio.server(
        interceptors=[
            GrpcCalls(begin=models.began, finish=models.finished, untold_services=_OPEN),
            # Before all that reads messages, so that clients without a key learn nothing else.
            GrpcAuth(
                keys,
                access=access,
                refused=lambda peer: account_of(peer).not_let_in(),
                turns=models.turns,
            ),
            GrpcMessages(
                account_of=account_of, open_services=_OPEN, timeout_s=limits.body_timeout_s
            ),
        ],
        options=_options(limits, models.max_inflight),
    )
    for service in (inference, admin, *further):
        service.add(service.servicer, server)
    healthy = [SERVICE, *(service.descriptor.full_name for service in further)]
    health_pb2_grpc.add_HealthServicer_to_server(_GatewayHealth(models, healthy), server)
    files = [pb.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR]
    add_reflection([*files, *(service.descriptor.file for service in further)], server)
    return server


def _options(limits: ConnectionLimits, max_inflight: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Connections above this are closed on arrival. The guard ends strangers' to make room.
        ("grpc.max_allowed_incoming_connections", limits.max_connections + _SPARE_CONNECTIONS),
        # More than a gateway takes in flight: beyond this limit, clients wait without an error.
        ("grpc.max_concurrent_streams", 2 * max_inflight),
        ("grpc.server_handshake_timeout_ms", _ms(limits.head_timeout_s)),
        ("grpc.max_connection_idle_ms", _ms(limits.idle_timeout_s)),
        ("grpc.max_connection_age_ms", _ms(GRPC_CONNECTION_AGE_S)),
        # Above the first limit, ever more calls are refused; above the second, all.
        ("grpc.max_metadata_size", 8 * 2**10),
        ("grpc.absolute_max_metadata_size", 16 * 2**10),
        # Small, so that little of a flood is read before the guard's next check.
        ("grpc.tcp_receive_buffer_size", 128 * 2**10),
        ("grpc.experimental.tcp_max_read_chunk_size", 16 * 2**10),
        # Detects clients that vanished without closing the connection, and ends their streams.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Clients may ping as often as gRPC allows; those that ping more often are disconnected.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class _GatewayHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """The grpc.health.v1 service; it follows the gateway's readiness."""

    def __init__(self, models: Models, services: Iterable[str]) -> None:
        super().__init__()
        self._models = models
        self._names = ("", *services)
        self._changed = asyncio.Event()
        self._on_change()
        models.watch(self._on_change)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Ends when the gateway drains; otherwise watchers would keep it until the grace period is
        over."""
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        shown = None
        while True:
            changed = self._changed
            status = self._server_status.get(request.service, unknown)
            if status != shown:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                shown = status
                continue  # It may have changed during the write.
            if self._models.is_draining:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")
            await changed.wait()

    def _on_change(self) -> None:
        self._server_status = dict.fromkeys(self._names, self._status())
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        is_ready = self._models.is_ready
        response = health_pb2.HealthCheckResponse
        return response.SERVING if is_ready else response.NOT_SERVING


def _input(given: pb.EmbedInput) -> Prompt:
    if given.WhichOneof("input") is None:
        raise InvalidRequest("input is empty: set text or token_ids", param="inputs")
    is_text = given.HasField("text")
    return (Text(given.text) if is_text else Tokens(given.token_ids.ids),)


def _prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt is missing: set text, token_ids or chat", param="prompt")
    if kind == "chat":
        return (_chat(request.chat),)
    if isinstance(request, pb.TokenizeRequest):
        return (Text(request.text, add_special_tokens=not request.no_special_tokens),)
    return (Tokens(request.token_ids.ids) if kind == "token_ids" else Text(request.text),)


def _chat(chat: pb.Chat) -> Chat:
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"chat has {len(chat.messages)} messages: at most {MAX_MESSAGES}", param="chat"
        )
    tools = check_tools(_json("tools_json", chat.tools_json or "[]", max_chars=_MAX_TOOLS_CHARS))
    return Chat(
        [_message(turn) for turn in chat.messages],
        add_generation_prompt=not chat.no_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_kwargs=_object("template_kwargs_json", chat.template_kwargs_json),
        tools=[tool.spec for tool in tools],
    )


def _message(turn: pb.ChatMessage) -> dict[str, object]:
    more = _object("fields_json", turn.fields_json) if turn.fields_json else {}
    return {"role": turn.role, "content": turn.content, **more}


def _object(name: str, given: str) -> dict[str, Any]:
    value = _json(name, given or "{}", max_chars=_MAX_JSON_CHARS)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object", param=name)
    return value


def _json(name: str, given: str, *, max_chars: int) -> Any:
    if len(given) > max_chars:
        raise InvalidRequest(f"{name} has {len(given)} characters: at most {max_chars}", param=name)
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", param=name) from error
