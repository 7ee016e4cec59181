"""Groups that are killed or stopped: real processes, ranks and signals, without Ray.

All streams run on the group that is lost. Their answers must equal those of the other group for
the same requests without a loss.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.service import ModelService
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.group_link import GroupContact, grpc_connect
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.request.config import EngineConfig
from quire.worker.request.request import Request, Text
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.request.structured import json_constraint
from quire.worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

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
        ranks = executor.pids if isinstance(executor, LockstepExecutor) else ()
        pipe.send((server.contact, ranks))
        await asyncio.to_thread(pipe.recv)
        await server.stop(drain_timeout_s=0)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def group(
    name: str, *, num_ranks: int, step_s: float = 0.0
) -> AsyncIterator[tuple[GroupContact, int, tuple[int, ...]]]:
    """Yields a group's address, its process id and those of its ranks, if they are processes."""
    engine = replace(CONFIG.engine, tensor_parallel_size=num_ranks)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    args = (replace(CONFIG, engine=engine), name, step_s, theirs)
    process = context.Process(target=run_group, args=args, daemon=False)
    process.start()
    theirs.close()
    try:
        contact, ranks = await asyncio.to_thread(ours.recv)
        assert process.pid is not None
        yield contact, process.pid, ranks
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def request(number: int) -> Request:
    return Request(
        prompt=(Text(f"Question {number}: what is it?"),),
        sampling=SamplingParams(
            temperature=number % 2, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
        ),
    )


def guessed(number: int) -> Request:
    """A request with many accepted draft tokens: its grammar forces keys, and items are alike."""
    item = {
        "type": "object",
        "properties": {"a long name": {"type": "boolean"}, "another name": {"enum": [1, 2]}},
        "required": ["a long name", "another name"],
        "additionalProperties": False,
    }
    sampling = replace(
        request(number).sampling,
        structured_outputs=json_constraint({"type": "array", "items": item, "minItems": 20}),
        repetition_penalty=1.01,
    )
    return replace(request(number), sampling=sampling)


REQUESTS = {
    "plain": [request(number) for number in range(NUM_STREAMS)],
    "guessed": [guessed(number) for number in range(2)],
}


class Streams:
    """Streams under way at one gateway."""

    def __init__(self, gateway: ModelService, requests: Sequence[Request]) -> None:
        self._gateway = gateway
        self.token_ids: list[list[int]] = [[] for _ in requests]
        self._tasks = [
            asyncio.create_task(self._run(number, each)) for number, each in enumerate(requests)
        ]

    async def have_begun(self, *, num_tokens: int) -> None:
        while not all(len(ids) >= num_tokens for ids in self.token_ids):
            await asyncio.sleep(0.01)

    async def have_ended(self) -> list[list[int]]:
        await asyncio.gather(*self._tasks)
        return self.token_ids

    async def _run(self, number: int, request: Request) -> None:
        prepared = await self._gateway.prepare(request)

        async def take(chunk: Chunk) -> None:
            assert chunk.token_offset == len(self.token_ids[number])
            self.token_ids[number] += chunk.token_ids

        await self._gateway.run([prepared], take)


@pytest.mark.anyio
async def test_no_stream_of_a_lost_group_breaks_or_changes() -> None:
    async with contextlib.AsyncExitStack() as stack:
        # Slow steps: no stream ends before all have begun.
        victims = {
            name: group(name, num_ranks=2 if "rank" in name else 1, step_s=0.1)
            for name in ("killed", "stopped", "rank killed", "rank stopped", "guessed killed")
        }
        spare, _, _ = await stack.enter_async_context(group("spare", num_ranks=1))
        table = RoutingTable(block_size=CONFIG.engine.block_size)
        contacts: dict[str, GroupContact] = {}
        groups = Groups(
            table=table,
            expected=Expectation(model="demo", block_size=CONFIG.engine.block_size),
            config=GroupClientConfig(
                silence_timeout_s=CONFIG.silence_timeout_s,
                step_deadline_s=CONFIG.step_deadline_s,
                # A small window, so that no group gets far ahead of a gateway without CPU time.
                window_tokens=16,
            ),
            connect=partial(grpc_connect, contacts=contacts),
        )
        stack.push_async_callback(groups.close)
        tokenizer = Tokenizer.load(demo_model.PATH)
        patient = AdmissionConfig(max_queue_wait_s=1000)
        gateway = ModelService(
            model="demo",
            tokenizer=tokenizer,
            groups=groups,
            table=table,
            config=GatewayConfig(admission=patient),
        )

        contacts[spare.address] = spare
        await only(groups, "spare", spare.address)
        expected = {
            kind: await Streams(gateway, each).have_ended() for kind, each in REQUESTS.items()
        }
        assert all(len(ids) == NUM_TOKENS for each in expected.values() for ids in each)
        for how, victim in victims.items():
            async with victim as (contact, process_id, ranks):
                contacts[contact.address] = contact
                await only(groups, how, contact.address)
                kind = "guessed" if how.startswith("guessed") else "plain"
                streams = Streams(gateway, REQUESTS[kind])
                await streams.have_begun(num_tokens=30 if kind == "guessed" else 3)
                groups.set_addresses([contact.address, spare.address])
                if kind == "guessed":
                    assert groups.loads[GroupId(how)].num_accepted_tokens > 0
                resumed = gateway.telemetry.resumes._value.get()
                target = ranks[1] if how.startswith("rank") else process_id
                os.kill(target, signal.SIGKILL if how.endswith("killed") else signal.SIGSTOP)
                found = await streams.have_ended()
                num_resumed = gateway.telemetry.resumes._value.get() - resumed
                assert num_resumed > len(found) // 2, f"{how}: most were in their midst"
                assert found == expected[kind], how
        assert gateway.telemetry.completions.labels("error")._value.get() == 0
        assert cast(Any, gateway.telemetry.quarantined)._value.get() == 0


async def only(groups: Groups, name: str, address: str) -> None:
    """Routes all requests to one group."""
    groups.set_addresses([address])
    while name not in groups.loads or groups.num_ready != 1:
        await groups.wait_for_change(timeout_s=5)
