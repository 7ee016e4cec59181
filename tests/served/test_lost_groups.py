"""Groups that are killed or stopped in earnest: real processes, ranks and signals, without Ray.

All streams run on the group that is lost. What they must bring is what the other group brings for
the same requests when nothing happens.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from quire import demo_model
from quire.cluster.admission.config import AdmissionConfig
from quire.cluster.config import ClusterConfig
from quire.cluster.gateway.generation import GenerationRequest
from quire.cluster.gateway.service import Gateway, GatewayConfig
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.table import RoutingTable
from quire.worker.config import EngineConfig
from quire.worker.process_executor import ProcessExecutor
from quire.worker.sampling_params import SamplingParams
from quire.worker.text import Tokenizer

NUM_STREAMS = 100
NUM_TOKENS = 80
CONFIG = ClusterConfig(
    engine=EngineConfig(
        model=demo_model.PATH,
        dtype="float32",
        num_blocks=2000,
        max_num_seqs=NUM_STREAMS,
        max_num_batched_tokens=512,
        num_threads=1,
    ),
    served_model_name="demo",
    silence_timeout_s=4,
    step_deadline_s=8,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def run_group(config: ClusterConfig, name: str, step_s: float, pipe: Connection) -> None:
    """The body of a group's process. A step waits for ``step_s`` before it begins."""

    async def run() -> None:
        server = await GroupServer.start(config, group_id=name)
        step = server._engine.step

        def wait_and_step() -> Any:
            time.sleep(step_s)
            return step()

        server._engine.step = wait_and_step  # type: ignore[method-assign]
        executor = server._engine._executor
        ranks = executor.pids if isinstance(executor, ProcessExecutor) else ()
        pipe.send((server.address, ranks))
        await asyncio.to_thread(pipe.recv)
        await server.stop(drain_timeout_s=0)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def group(
    name: str, *, num_ranks: int, step_s: float = 0.0
) -> AsyncIterator[tuple[str, int, tuple[int, ...]]]:
    """Yields its address, its process id and those of its ranks, if they have processes."""
    engine = replace(CONFIG.engine, tensor_parallel_size=num_ranks)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    args = (replace(CONFIG, engine=engine), name, step_s, theirs)
    process = context.Process(target=run_group, args=args, daemon=False)
    process.start()
    theirs.close()
    try:
        address, ranks = await asyncio.to_thread(ours.recv)
        assert process.pid is not None
        yield address, process.pid, ranks
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def request(number: int) -> GenerationRequest:
    return GenerationRequest(
        prompt=f"Question {number}: what is it?",
        params=SamplingParams(
            temperature=number % 2, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
        ),
    )


class Streams:
    """All requests, under way at one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.token_ids: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self._tasks = [asyncio.create_task(self._run(n)) for n in range(NUM_STREAMS)]

    async def have_begun(self) -> None:
        while not all(len(ids) > 2 for ids in self.token_ids):
            await asyncio.sleep(0.01)

    async def have_ended(self) -> list[list[int]]:
        await asyncio.gather(*self._tasks)
        return self.token_ids

    async def _run(self, number: int) -> None:
        generation = await self._gateway.prepare(request(number))
        async for chunk in self._gateway.stream([generation]):
            assert chunk.token_offset == len(self.token_ids[number])
            self.token_ids[number] += chunk.token_ids


@pytest.mark.anyio
async def test_no_stream_of_a_lost_group_breaks_or_changes() -> None:
    async with contextlib.AsyncExitStack() as stack:
        # So slow that none of their streams has ended when all have begun.
        victims = {
            "killed": group("killed", num_ranks=1, step_s=0.1),
            "stopped": group("stopped", num_ranks=1, step_s=0.1),
            "rank killed": group("rank killed", num_ranks=2, step_s=0.1),
            "rank stopped": group("rank stopped", num_ranks=2, step_s=0.1),
        }
        spare, _, _ = await stack.enter_async_context(group("spare", num_ranks=1))
        table = RoutingTable(block_size=CONFIG.engine.block_size)
        groups = Groups(
            table=table,
            expected=Expectation(model="demo", block_size=CONFIG.engine.block_size),
            config=GroupClientConfig(
                silence_timeout_s=CONFIG.silence_timeout_s,
                step_deadline_s=CONFIG.step_deadline_s,
                # So few that no group gets far ahead of a gateway that does not get the CPU.
                window_tokens=16,
            ),
        )
        stack.push_async_callback(groups.close)
        tokenizer = Tokenizer.load(demo_model.PATH)
        patient = AdmissionConfig(max_queue_wait_s=1000, standing_wait_s=1000)
        gateway = Gateway(
            model="demo",
            tokenizer=tokenizer,
            groups=groups,
            table=table,
            config=GatewayConfig(admission=patient),
        )

        await only(groups, "spare", spare)
        expected = await Streams(gateway).have_ended()
        assert all(len(ids) == NUM_TOKENS for ids in expected)
        for how, victim in victims.items():
            async with victim as (address, process_id, ranks):
                await only(groups, how, address)
                streams = Streams(gateway)
                await streams.have_begun()
                groups.set_addresses([address, spare])
                resumed = gateway.telemetry.resumes._value.get()
                target = ranks[1] if how.startswith("rank") else process_id
                os.kill(target, signal.SIGKILL if how.endswith("killed") else signal.SIGSTOP)
                found = await streams.have_ended()
                num_resumed = gateway.telemetry.resumes._value.get() - resumed
                assert num_resumed > NUM_STREAMS // 2, f"{how}: most were in their midst"
                assert found == expected, how
        assert gateway.telemetry.completions.labels("error")._value.get() == 0
        assert cast(Any, gateway.telemetry.quarantined)._value.get() == 0


async def only(groups: Groups, name: str, address: str) -> None:
    """Makes one group the only one that requests go to."""
    groups.set_addresses([address])
    while name not in groups.loads or groups.num_ready != 1:
        await groups.wait_for_change(timeout_s=5)
