"""A network between gateway and group that stalls, breaks and heals, on real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
NUM_TOKENS = 200


class Wire:
    """Forwards connections to an address. While stalled, it delays bytes."""

    def __init__(self, address: str) -> None:
        self.address = ""
        self.is_flowing = asyncio.Event()
        self.is_flowing.set()
        self._target = address
        self._connections: list[list[asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, address: str) -> AsyncIterator[Self]:
        self = cls(address)
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.break_all()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_all(self) -> None:
        """Resets every open connection."""
        connections, self._connections = self._connections, []
        for writers in connections:
            for writer in writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.split(":")
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        self._connections.append([writer, other_writer])
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                await self.is_flowing.wait()
                sink.write(data)
                await sink.drain()
            sink.close()


def generate(cluster: Any, *, seed: int = 5) -> Any:
    params = pb.SamplingParams(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    return cluster.inference.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=params)
    )


async def tokens_of(call: Any, chunks: list[pb.GenerateResponse]) -> list[int]:
    chunks += [chunk async for chunk in call]
    found: list[int] = []
    for chunk in chunks:
        assert chunk.token_offset == len(found)
        found += chunk.token_ids
    return found


@pytest.mark.slow
async def test_streams_go_on_elsewhere_and_nothing_comes_twice_after_the_heal(
    start_cluster: Any, start_group: Any
) -> None:
    far = {"max_num_seqs": 64, "num_blocks": 4000}
    async with (
        start_cluster(num_groups=1, client={"silence_timeout_s": 1.5}, **far) as cluster,
        start_group("far", service={"gateway_timeout_s": 2.0}, **far) as cut,
        Wire.to(cut.address) as wire,
    ):
        (near,) = cluster.groups.values()
        for group in (near, cut):
            group.executor.step_s = 0.1  # So that none has ended when all have begun.
        cluster.connections.set_addresses([wire.address])
        await cluster.connections.wait_for_change(timeout_s=5)
        while "far" not in cluster.connections.loads:
            await cluster.connections.wait_for_change(timeout_s=5)
        calls = [generate(cluster, seed=seed) for seed in range(20)]
        chunks = [[await anext(aiter(call))] for call in calls]
        cluster.connections.set_addresses([wire.address, near.address])
        wire.is_flowing.clear()
        reads = [asyncio.create_task(tokens_of(*each)) for each in zip(calls, chunks, strict=True)]
        while cluster.gateway.telemetry.resumes._value.get() < 20:
            await asyncio.sleep(0.01)
        # Cut off from its gateway, the group releases its requests.
        await cut.settle()
        assert cut.executor.num_steps < NUM_TOKENS
        near.executor.step_s = 0.002
        # Delayed data arrives, and the gateway attaches again.
        wire.is_flowing.set()
        await cluster.wait_ready(2)
        found = await asyncio.gather(*reads)
        assert not cut.engine_loop.failed.done()
        assert cluster.gateway.telemetry.resumes._value.get() == 20
    for seed, tokens in enumerate(found):
        assert tokens == cluster.model.continuation(PROMPT, seed=seed, max_tokens=NUM_TOKENS)


async def test_connections_that_break_are_no_deaths(start_cluster: Any) -> None:
    """Breaks as often as groups may die under a request, which continues on the same group."""
    async with start_cluster(num_groups=1, group_wait_s=30) as cluster:
        (group,) = cluster.groups.values()
        group.executor.step_s = 0.05
        async with Wire.to(group.address) as wire:
            cluster.connections.set_addresses([wire.address])
            await cluster.connections.wait_for_change(timeout_s=5)
            await cluster.wait_ready(1)
            call = generate(cluster)
            chunks = [await anext(aiter(call))]
            for _ in range(4):
                wire.break_all()
                await cluster.connections.wait_for_change(timeout_s=30)
                await cluster.wait_ready(1)
                chunks.append(await anext(aiter(call)))
            group.executor.step_s = 0.002
            found = await tokens_of(call, chunks)
            assert cluster.gateway.telemetry.quarantined._value.get() == 0
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_a_killed_group_loses_none_of_a_hundred_streams(start_cluster: Any) -> None:
    async with start_cluster(
        num_groups=3, max_num_seqs=128, max_num_batched_tokens=256, num_blocks=8000
    ) as cluster:
        cluster.take_steps_of(0.1)  # So that none has ended when all have begun.
        calls = [generate(cluster, seed=seed) for seed in range(100)]
        chunks = [[await anext(aiter(call))] for call in calls]
        killed = cluster.groups["g0"]
        num_there = sum(each[0].start.routing.group == "g0" for each in chunks)
        assert num_there >= 20
        await killed.kill()
        cluster.take_steps_of(0.002)
        found = await asyncio.gather(
            *[tokens_of(*each) for each in zip(calls, chunks, strict=True)]
        )
        assert cluster.gateway.telemetry.resumes._value.get() == num_there
    for seed, tokens in enumerate(found):
        assert tokens == cluster.model.continuation(PROMPT, seed=seed, max_tokens=NUM_TOKENS)
