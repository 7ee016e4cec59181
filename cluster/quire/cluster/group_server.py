"""One replica group, ready to serve: ranks, engine, its thread, and the gRPC server over them.

It is ready when a request has gone through the model, not when a port is open.
"""

import asyncio
import time
from typing import Self

import grpc.aio
import numpy as np

from quire.cluster.config import ClusterConfig
from quire.cluster.engine_loop import EngineLoop
from quire.cluster.group_service import GroupService
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc
from quire.worker.engine import Engine
from quire.worker.errors import QuireError
from quire.worker.executor import make_executor
from quire.worker.model_facts import ModelFacts
from quire.worker.request import Request, TokenDelta
from quire.worker.sampling_params import SamplingParams

_CLOSE_S = 1.0
"""What a stopping server gives streams that have nothing left to say."""


class GroupServer:
    """Made by `start`; belongs to the event loop that made it."""

    def __init__(
        self,
        *,
        address: str,
        engine: Engine,
        engine_loop: EngineLoop,
        service: GroupService,
        server: grpc.aio.Server,
    ) -> None:
        self.address = address
        """``host:port`` for gateways."""
        self._engine = engine
        self._engine_loop = engine_loop
        self._service = service
        self._server = server

    @classmethod
    async def start(cls, config: ClusterConfig, *, group_id: str) -> Self:
        """Starts the ranks, lets them decode once, and listens on a free port.

        Raises:
            ConfigError, CheckpointError: The model cannot run like this.
            RankFailure: A rank died on the way.
        """
        executor, facts = await asyncio.to_thread(make_executor, config.engine)
        try:
            engine = Engine(config.engine, facts, executor, epoch=time.time_ns())
        except BaseException:
            executor.close()
            raise
        engine_loop = EngineLoop(engine)
        try:
            await _decode_once(engine_loop)
            description = _describe(config, facts, engine, group_id=group_id)
            service = GroupService(engine_loop, description)
            server = grpc.aio.server()
            group_pb2_grpc.add_ReplicaGroupServicer_to_server(service, server)
            port = server.add_insecure_port(f"{config.group_host}:0")
            await server.start()
        except BaseException:
            await engine_loop.close()
            engine.close()
            raise
        return cls(
            address=f"{config.group_host}:{port}",
            engine=engine,
            engine_loop=engine_loop,
            service=service,
            server=server,
        )

    def check(self) -> None:
        """Raises RankFailure: the group has failed and must be replaced."""
        if self._engine_loop.failed.done():
            raise self._engine_loop.failed.result()

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Takes no new request, lets those at hand end, then ends everything that it started."""
        if not self._engine_loop.failed.done():
            await self._service.drain(timeout_s=drain_timeout_s)
        await self._server.stop(_CLOSE_S)
        await self._engine_loop.close()
        await asyncio.to_thread(self._engine.close)


async def _decode_once(engine_loop: EngineLoop) -> None:
    """One token through every rank: what is broken shows now, and first calls are behind us."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sink(delta: TokenDelta | QuireError) -> None:
        if isinstance(delta, QuireError):
            ended.set_exception(delta)
        elif delta.finish_reason is not None:
            ended.set_result(None)

    prompt = np.zeros(1, dtype=np.uint32)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine_loop.submit(Request(request_id="warm-up", prompt_token_ids=prompt, params=params), sink)
    await ended


def _describe(
    config: ClusterConfig, facts: ModelFacts, engine: Engine, *, group_id: str
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
    )
