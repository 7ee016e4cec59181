"""`vllm.grpc.engine`, for gateways written for vLLM's gRPC engine.

It presents a whole cluster as one engine with one model, the first where there are several. The
service is defined in the package smg-grpc-proto, and served if that is installed. Calls that would
act on a single engine are refused with the reason.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from quire import __version__
from quire.cluster.edge.access import Access, Caller, allows
from quire.cluster.edge.auth import grpc_caller, operates_grpc
from quire.cluster.edge.grpc_calls import check_lists, client_id, held, remaining_s
from quire.cluster.edge.grpc_errors import Context, refuse, statuses
from quire.cluster.edge.streams import sane_client_id
from quire.cluster.features.embeddings.embed import Ask, embed
from quire.cluster.features.kv_events.stream import KvEventsConfig, Outlet, Ranks, Subscription
from quire.cluster.features.vllm_grpc.format import Answers, aliases_of, prompt_of, sampling_of
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.service import ModelService
from quire.cluster.gateway.work import Take
from quire.v1 import group_pb2
from quire.worker.request.errors import InvalidRequest, QueueFull
from quire.worker.request.request import Request, Tokens

VLLM_FILE = vllm.DESCRIPTOR
VLLM_SERVICE = VLLM_FILE.services_by_name["VllmEngine"]
add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
_PIECE_BYTES = 2**16


class _Run:
    """A running request that another call may abort."""

    def __init__(self) -> None:
        self.is_aborted = False
        self._task: asyncio.Future[None] | None = None
        self._is_writing = False

    def abort(self) -> None:
        self.is_aborted = True
        self._end()

    async def follow(
        self,
        run: Callable[[Take], Coroutine[Any, Any, None]],
        write_all: Take,
    ) -> None:
        """Passes the chunks of ``run`` to ``write_all`` until it ends or the request is aborted."""

        async def take(chunk: Chunk) -> None:
            if self.is_aborted:
                return
            # A message must be sent completely before the task may be cancelled.
            self._is_writing = True
            await write_all(chunk)
            self._is_writing = False
            if self.is_aborted:
                self._end()

        if self.is_aborted:
            return
        self._task = asyncio.ensure_future(run(take))
        try:
            await self._task
        except asyncio.CancelledError:
            call = asyncio.current_task()
            if not self.is_aborted or (call is not None and call.cancelling()):
                raise

    def _end(self) -> None:
        if self._task is not None and not self._is_writing:
            self._task.cancel()


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves a gateway's model as a vLLM engine."""

    def __init__(
        self,
        models: Models,
        *,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        self._models = models
        self._kv_events = kv_events or KvEventsConfig()
        self._ranks = Ranks()
        self._num_subscribers = 0
        self._runs: dict[tuple[str, str], set[_Run]] = defaultdict(set)
        """Running calls by tenant and client's id, so that no tenant can abort another's."""
        self._began_s = time.monotonic()
        self._last_request_s = 0.0  # In seconds since 1970.
        self._bundle: bytes | None = None

    @allows(Access.KEY)
    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        aliases = aliases_of(request)
        async with statuses(context, request, aliases=aliases):
            self._last_request_s = time.time()
            caller = grpc_caller()
            name, run = (caller.tenant, request.request_id), _Run()
            self._runs[name].add(run)
            try:
                await self._generate(request, context, caller, run)
            finally:
                self._runs[name].remove(run)
                if not self._runs[name]:
                    del self._runs[name]

    async def _generate(
        self, request: vllm.GenerateRequest, context: Context, caller: Caller, run: _Run
    ) -> None:
        with held(request, self._models, caller.tenant):
            check_lists(request.sampling_params)
            prepared = await self._model.prepare(
                Request(
                    prompt=prompt_of(request),
                    sampling=sampling_of(request.sampling_params),
                    tenant=caller.tenant,
                    key_name=caller.key_name,
                    client_id=client_id(context) or sane_client_id(request.request_id),
                    timeout_s=remaining_s(context),
                )
            )
        answers = Answers(prepared, is_stream=request.stream)
        request.Clear()  # Frees the prompt: it is token ids now.

        async def write(chunk: Chunk) -> None:
            for message in answers.of(chunk):
                await context.write(message)

        await run.follow(partial(self._model.run, [prepared]), write)
        if run.is_aborted:
            for message in answers.aborted():
                await context.write(message)

    @allows(Access.KEY)
    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        async with statuses(context, request):
            tenant = grpc_caller().tenant
            for name in request.request_ids:
                for run in self._runs.get((tenant, name), ()):
                    run.abort()
        return vllm.AbortResponse()

    @allows(Access.KEY)
    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        if self._models.is_ready:
            return vllm.HealthCheckResponse(healthy=True, message="Health")
        why = (
            "the gateway is stopping"
            if self._models.is_draining
            else "no replica group is attached"
        )
        return vllm.HealthCheckResponse(healthy=False, message=why)

    @allows(Access.KEY)
    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        response = vllm.GetModelInfoResponse()
        async with statuses(context, request):
            card = await self._model.card()
            ends = {token for group in self._groups() for token in group.eos_token_ids}
            response = vllm.GetModelInfoResponse(
                model_path=card.model,
                served_model_name=card.model,
                tokenizer_path=card.model,
                is_generation=True,
                max_context_length=card.max_model_len,
                max_req_input_len=card.max_model_len,
                vocab_size=card.vocab_size,
                eos_token_ids=sorted(ends),
            )
        return response

    @allows(Access.KEY)
    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        response = vllm.GetServerInfoResponse()
        async with statuses(context, request):
            card = await self._model.card()
            sees_all = grpc_caller().sees is None
            response = vllm.GetServerInfoResponse(
                # This counts all tenants, so it is for operators only.
                active_requests=self._models.num_inflight if sees_all else 0,
                is_paused=self._models.is_draining,
                last_receive_timestamp=self._last_request_s if sees_all else 0,
                uptime_seconds=time.monotonic() - self._began_s,
                server_type="vllm-grpc",
                data_parallel_size=1,
                kv_cache_dtype=card.kv_dtype,
                block_size=card.block_size,
                max_num_seqs=sum(group.max_num_seqs for group in self._groups()),
                constrained_decoding_start="first_token",
            )
        return response

    @allows(Access.OPERATOR)
    async def GetLoads(
        self, request: vllm.GetLoadsRequest, context: Context
    ) -> vllm.GetLoadsResponse:
        response = vllm.GetLoadsResponse()
        async with statuses(context, request):
            if request.dp_rank:
                raise InvalidRequest(
                    f"dp_rank={request.dp_rank} is out of range: rank 0 is all replica groups",
                    param="dp_rank",
                )
            response = vllm.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(),
                version=__version__,
                dp_rank_count=1,
                loads=[self._load()],
            )
        return response

    @allows(Access.KEY)
    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        async with statuses(context, request):
            if self._bundle is None:
                self._bundle = await asyncio.to_thread(self._model.tokenizer.as_zip)
            bundle = self._bundle
            starts = range(0, len(bundle), _PIECE_BYTES)
            for start in starts:
                chunk = common_pb2.GetTokenizerChunk(data=bundle[start : start + _PIECE_BYTES])
                if start == starts[-1]:
                    chunk.sha256 = hashlib.sha256(bundle).hexdigest()
                await context.write(chunk)

    @allows(Access.KEY)
    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        response = vllm.EmbedResponse()
        async with statuses(context, request):
            self._last_request_s = time.time()
            caller = grpc_caller()
            with held(request, self._models, caller.tenant):
                ask = Ask(
                    tenant=caller.tenant,
                    key_name=caller.key_name,
                    client_id=client_id(context) or sane_client_id(request.request_id),
                    timeout_s=remaining_s(context),
                )
                prompt = (Tokens(request.tokenized.input_ids),)
                (made,) = await embed(self._model, [prompt], ask)
            response.embedding.extend(made.vector_C.tolist())
            response.embedding_dim = len(made.vector_C)
            response.prompt_tokens = made.num_prompt_tokens
        return response

    @allows(Access.KEY)
    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Context) -> NoReturn:
        await _refuse(context, "FlushCache: answers do not depend on what is cached")

    @allows(Access.KEY)
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> NoReturn:
        await _refuse(context, "StartProfile: a gateway has no engine to profile")

    @allows(Access.KEY)
    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> NoReturn:
        await _refuse(context, "StopProfile: a gateway has no engine to profile")

    @allows(Access.OPERATOR)  # The events reveal all tenants' prompts.
    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        async with statuses(context, request):
            await self._model.card()
            model = self._model
            if not any(group.kv_events for group in self._groups()):
                await _refuse(
                    context,
                    "SubscribeKvEvents: the model's groups do not remember the tokens of their "
                    "blocks: serve it with --kv-events",
                )
            if request.start_sequence_number:
                await refuse(
                    context,
                    grpc.StatusCode.OUT_OF_RANGE,
                    "OUT_OF_RANGE",
                    f"start_sequence_number={request.start_sequence_number}: each call numbers its "
                    "batches from 1; leave it out, and begin with a snapshot",
                )
            if self._num_subscribers >= self._kv_events.max_subscribers:
                raise QueueFull(
                    f"{self._num_subscribers} others follow this gateway's cache events, "
                    f"{self._kv_events.max_subscribers} may: end one, or ask another gateway"
                )
            subscription = Subscription(
                model.groups,
                self._ranks,
                config=self._kv_events,
                adapter_names=partial(self._adapter_names, model),
                loads_at_once=request.load_records_before_first_batch,
            )
            outlet, is_operator = Outlet(context.write), operates_grpc()

            def is_over() -> bool:
                return self._models.is_draining or self._model is not model or not is_operator()

            self._num_subscribers += 1
            try:
                await subscription.run(outlet.write, is_over)
            finally:
                self._num_subscribers -= 1
                await outlet.settle()

    def _adapter_names(self, model: ModelService) -> dict[str, str]:
        return {
            each.digest: each.name for each in self._models.adapters if each.model == model.model
        }

    @property
    def _model(self) -> ModelService:
        """The first model: these messages name none. Raises InvalidRequest if there is none."""
        return next(iter(self._models.by_name.values()), None) or self._models.named(None)

    def _groups(self) -> list[group_pb2.GroupDescription]:
        """The descriptions of the attached groups."""
        clients = self._model.groups.clients
        return [client.description for client in clients if client.is_attached]

    def _load(self) -> vllm.SchedulerLoad:
        """The combined load of all groups."""
        groups, loads = self._groups(), list(self._model.groups.loads.values())
        num_running = sum(load.num_running for load in loads)
        num_waiting = sum(load.num_waiting for load in loads)
        used = sum(load.num_held_blocks for load in loads)
        blocks = sum(group.num_blocks for group in groups)
        size = max((group.block_size for group in groups), default=0)
        num_prompt = sum(load.num_prompt_tokens for load in loads)
        num_hit = sum(load.num_hit_tokens for load in loads)
        return vllm.SchedulerLoad(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_total_reqs=num_running + num_waiting,
            num_used_tokens=used * size,
            max_total_num_tokens=blocks * size,
            token_usage=used / blocks if blocks else 0.0,
            cache_hit_rate=num_hit / num_prompt if num_prompt else 0.0,
            max_running_requests=sum(group.max_num_seqs for group in groups),
            num_waiting_uncached_tokens=sum(load.num_pending_prefill_tokens for load in loads),
        )


async def _refuse(context: Context, why: str) -> NoReturn:
    await refuse(context, grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", why)
    raise AssertionError  # Not reached: `refuse` has raised.
