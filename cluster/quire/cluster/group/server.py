"""One replica group: its ranks, its engine, the engine's thread, and the gRPC server over them.

It counts as ready when a request has gone through the model, not when a port is open.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.cluster.config import GroupConfig, GroupModel
from quire.cluster.features.adapters.group import GroupAdapters
from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.cluster.features.kv_exchange.peers import Peers
from quire.cluster.features.nodes.placement import OnStep, start_ranks, transfers_kv
from quire.cluster.features.tracing.tracing import start_tracing
from quire.cluster.group.engine_loop import EngineLoop
from quire.cluster.group.service import GroupService, build_group_server
from quire.cluster.group.session import TracesTo
from quire.cluster.links.group_link import GroupContact
from quire.cluster.tls import own_tls
from quire.cluster.wire import format_to_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.kv_format import KvFormat
from quire.worker.group_engine import GroupEngine
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.adapters.reading import checker, reader
from quire.worker.parts.adapters.store import AdapterStore
from quire.worker.parts.tiers.transfers import num_tiers
from quire.worker.request.engine_stats import EngineStats
from quire.worker.request.errors import QueueFull, QuireError
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared, Task
from quire.worker.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.cluster.features.tracing.span_export import SpanExport

_log = logging.getLogger(__name__)

_HEARTBEATS = 8
"""Heartbeats within a gateway's silence timeout."""
_GATEWAY_PATIENCE = 3
"""A gateway's timeout as a multiple of a group's: a false alarm costs all its streams here, a late
one only the blocks that they hold."""
_CLOSE_S = 1.0
"""Seconds that a stopping server gives to streams without further output."""
_MAX_UNREAD = 4096
"""Outputs that a reader in this process may be behind before its request is aborted."""
_WARM_UP = Prepared(
    request_id="warm-up",
    prompt_token_ids=np.zeros(1, dtype=np.uint32),
    sampling=SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
)


class GroupServer:
    """A running replica group. It is made by `start` and belongs to that event loop."""

    def __init__(
        self,
        config: GroupConfig,
        facts: ModelFacts,
        engine: GroupEngine,
        *,
        group_id: str,
        kv_format: KvFormat,
        borrower: Borrower | None,
        traces: "SpanExport | None",
    ) -> None:
        """``borrower`` fetches blocks for the engine; ``None`` without KV transfer. `stop` closes
        ``traces``."""
        self._engine = engine
        self._traces = traces
        self._engine_loop = EngineLoop(engine)
        description = _describe(config, facts, engine, group_id=group_id)
        self._config = config
        tls = own_tls() if config.tls_certificate is not None else None
        self._peers = None
        if borrower is not None:
            description.kv_format.CopyFrom(format_to_proto(kv_format))
            self._peers = Peers(
                borrower,
                self._engine_loop.call,
                self._engine_loop.lend_kept,
                format=kv_format,
                host=config.group_host,
                tls=tls.context if tls else None,
            )
        self._service = GroupService(
            self._engine_loop,
            description,
            heartbeat_s=config.silence_timeout_s / _HEARTBEATS,
            gateway_timeout_s=config.silence_timeout_s * _GATEWAY_PATIENCE,
            adapters=_adapters(config) if config.engine.enable_lora else None,
            peers=self._peers,
            traces=TracesTo(group_id, traces.add) if traces is not None else None,
        )
        token = secrets.token_urlsafe(32)
        self._server = build_group_server(self._service, token=token)
        if tls is None:
            port = self._server.add_insecure_port(f"{config.group_host}:0")
        else:
            port = self._server.add_secure_port(f"{config.group_host}:0", tls.grpc_credentials)
        address = f"{config.group_host}:{port}"
        certificate = tls.certificate if tls else ""
        self.contact = GroupContact(address=address, token=token, certificate=certificate)
        """The address, token and certificate for gateways."""

    @classmethod
    async def start(
        cls, config: GroupConfig, *, group_id: str, on_step: OnStep = lambda _: None
    ) -> Self:
        """Starts the ranks, runs one request, and listens on a free port. ``on_step`` is called
        with the name of each step of the start as it begins.

        Raises:
            ConfigError, CheckpointError: The model cannot run with this configuration, or spans
                cannot be sent as configured.
            RankFailure: A rank died during the start.
        """
        traces = start_tracing(config.otlp_traces_endpoint, role="group", instance=group_id)
        # The executor's own deadline must pass first: it can name the rank that does not answer.
        step_timeout_s = min(config.engine.step_timeout_s, config.step_deadline_s)
        config = replace(config, engine=replace(config.engine, step_timeout_s=step_timeout_s))
        executor, facts = await asyncio.to_thread(start_ranks, config, on_step)
        on_step("first step")
        borrower = Borrower() if transfers_kv(config, facts) else None
        try:
            engine = GroupEngine(
                config.engine,
                facts,
                executor,
                epoch=time.time_ns(),
                fetch=borrower.fetch if borrower else None,
            )
        except BaseException:
            executor.close()
            raise
        self = cls(
            config,
            facts,
            engine,
            group_id=group_id,
            kv_format=executor.kv_format,
            borrower=borrower,
            traces=traces,
        )
        try:
            # This request reveals a broken model, and takes the slow first step.
            task: Task = "generate" if facts.has_head else "embed"
            async for _ in self.generate(replace(_WARM_UP, task=task)):
                pass
            self._engine_loop.watch(step_deadline_s=config.step_deadline_s)
            await self._server.start()
        except BaseException:
            await self.stop(drain_timeout_s=0)
            raise
        _log.info(
            "group %s serves %s at %s: %d rank(s), %d blocks of %d tokens, at most %d to a request",
            group_id,
            config.model_name,
            self.contact.address,
            config.engine.tensor_parallel_size,
            engine.stats().num_total_blocks,
            config.engine.block_size,
            engine.max_model_len,
        )
        return self

    async def generate(self, request: Prepared) -> AsyncGenerator[TokenDelta, None]:
        """Yields the output of each step for one request. Closing the generator aborts it.

        Raises:
            InvalidRequest, QueueFull, RankFailure: As the engine raises them.
            QueueFull: Also if the reader is `_MAX_UNREAD` outputs behind.
        """
        deltas: asyncio.Queue[TokenDelta | QuireError] = asyncio.Queue(_MAX_UNREAD + 1)

        def take(output: TokenDelta | QuireError) -> None:
            if deltas.qsize() == _MAX_UNREAD and not isinstance(output, QuireError):
                self._engine_loop.abort(request.request_id)
                output = QueueFull(f"{_MAX_UNREAD} outputs of the request wait to be read")
            deltas.put_nowait(output)

        self._engine_loop.submit(request, take)
        try:
            while True:
                delta = await deltas.get()
                if isinstance(delta, QuireError):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._engine_loop.abort(request.request_id)

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics after the last step."""
        return self._engine_loop.stats

    def check(self) -> None:
        """Raises RankFailure: the group has failed and must be replaced."""
        if self._engine_loop.failed.done():
            raise self._engine_loop.failed.result()

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Refuses new requests, lets running ones end or move to other groups within
        ``drain_timeout_s``, then ends everything that `start` started."""
        if not self._engine_loop.failed.done():
            _log.info("stops; requests end within %g s or move", drain_timeout_s)
            num_left = await self._service.drain(
                timeout_s=drain_timeout_s, handover_s=self._config.handover_s
            )
            _log.info("drained; %d requests were given back to their gateways", num_left)
        await self._server.stop(_CLOSE_S)
        if self._peers is not None:
            await self._peers.close()
        await self._engine_loop.close()
        await asyncio.to_thread(self._engine.close)
        if self._traces is not None:
            await self._traces.close()


def _adapters(config: GroupModel) -> GroupAdapters:
    read = reader(config.engine)

    async def check(digest: str) -> None:
        held = await asyncio.to_thread(read, digest)
        held.release()

    return GroupAdapters(AdapterStore(check=checker(config.engine)), check)


def _describe(
    config: GroupModel, facts: ModelFacts, engine: GroupEngine, *, group_id: str
) -> pb.GroupDescription:
    return pb.GroupDescription(
        group_id=group_id,
        epoch=engine.events.epoch,
        model=config.model_name,
        model_fingerprint=facts.fingerprint,
        kv_dtype=facts.kv_dtype,
        block_size=config.engine.block_size,
        max_model_len=engine.max_model_len,
        vocab_size=facts.vocab_size,
        tensor_parallel_size=config.engine.tensor_parallel_size,
        num_blocks=engine.stats().num_total_blocks,
        max_num_seqs=config.engine.max_num_seqs,
        eos_token_ids=facts.eos_token_ids,
        numerics=facts.numerics,
        num_tiers=num_tiers(config.engine),
        kv_events=config.engine.kv_events,
        task=facts.task,
    )
