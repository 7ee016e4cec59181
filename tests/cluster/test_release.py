"""A hundred clients disconnect at once: the engine frees their blocks within a step."""

import asyncio
import re
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

NUM = 100
OPTIONS = {
    "num_groups": 1,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
    "num_blocks": 8000,
    # No request is refused, however slow the group seems.
    "config": {"admission": AdmissionConfig(max_queue_wait_s=1000)},
}


class Steps:
    """Counts the steps from each request's abort until the engine releases it."""

    def __init__(self, group: Any) -> None:
        self.num_begun = 0
        self.waited: list[int] = []
        self._told: dict[str, int] = {}
        self._loop = group.engine_loop
        submit, abort_loop, abort_engine = self._loop.submit, self._loop.abort, group.engine.abort

        def begin(*args: Any) -> None:
            self.num_begun += 1
            submit(*args)

        def told(engine_id: str) -> None:
            abort_loop(engine_id)
            # Not before: during the call the engine's thread may end a step and begin another.
            self._told.setdefault(engine_id, self._loop.num_steps)

        def done(engine_id: str) -> bool:
            num_steps = self._loop.num_steps
            self.waited.append(num_steps - self._told.setdefault(engine_id, num_steps))
            result: bool = abort_engine(engine_id)
            return result

        self._loop.submit, self._loop.abort, group.engine.abort = begin, told, done


def generate(cluster: Any, number: int, **options: Any) -> Any:
    params = pb.SamplingParams(seed=number, max_tokens=300, ignore_eos=True)
    ids = pb.TokenIds(ids=[20 + number, *range(20, 40)])
    request = pb.GenerateRequest(token_ids=ids, sampling=params)
    return cluster.inference.Generate(request, **options)


async def held_blocks(cluster: Any) -> float:
    """The gauge of held blocks, read as Prometheus does."""
    async with httpx.AsyncClient(timeout=None) as client:
        metrics = (await client.get(f"{cluster.http_url}/metrics")).text
    values = re.findall(r"^quire_group_held_blocks\{.*\} (.*)$", metrics, re.MULTILINE)
    return sum(float(value) for value in values)


async def check_released(cluster: Any, steps: Steps) -> None:
    (group,) = cluster.groups.values()
    await group.settle()
    assert len(steps.waited) == steps.num_begun >= NUM
    assert max(steps.waited) <= 1
    assert group.engine_loop.num_requests == 0
    while await held_blocks(cluster):  # At most until the next heartbeat.
        await asyncio.sleep(0.01)
    # The next request is served normally.
    cluster.take_steps_of(0)
    tokens = [token async for chunk in generate(cluster, 7) for token in chunk.token_ids]
    expected = cluster.model.continuation([27, *range(20, 40)], seed=7, max_tokens=300)
    assert tokens == expected


@pytest.mark.slow
async def test_a_hundred_cancelled_calls(start_cluster: Any) -> None:
    async with start_cluster(**OPTIONS) as cluster:
        (group,) = cluster.groups.values()
        group.executor.step_s = 0.2  # So that none has ended when all have begun.
        steps = Steps(group)
        calls = [generate(cluster, number) for number in range(NUM)]
        for call in calls:
            await anext(aiter(call))
        assert await held_blocks(cluster) > NUM
        for call in calls:
            call.cancel()
        await check_released(cluster, steps)


@pytest.mark.slow
async def test_a_hundred_calls_past_their_deadline(start_cluster: Any) -> None:
    async with start_cluster(**OPTIONS) as cluster:
        (group,) = cluster.groups.values()
        steps = Steps(group)
        timeout_s = 2.0
        while steps.num_begun < NUM:  # A busy machine needs longer to begin them all.
            timeout_s *= 2
            group.executor.step_s = timeout_s / 80  # 300 tokens would take four times as long.
            calls = [generate(cluster, number, timeout=timeout_s) for number in range(NUM)]
            results = await asyncio.gather(
                *[read_to_end(call) for call in calls], return_exceptions=True
            )
            codes = {error.code() for error in results if isinstance(error, grpc.aio.AioRpcError)}
            assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
        await check_released(cluster, steps)


@pytest.mark.slow
async def test_a_hundred_http_clients_that_hang_up(start_cluster: Any) -> None:
    async with start_cluster(**OPTIONS) as cluster:
        (group,) = cluster.groups.values()
        group.executor.step_s = 0.2  # So that none has ended when all have begun.
        steps = Steps(group)
        limits = httpx.Limits(max_connections=NUM)
        async with httpx.AsyncClient(limits=limits, timeout=600) as client:
            await asyncio.gather(*[hang_up(client, cluster, number) for number in range(NUM)])
        await check_released(cluster, steps)


async def read_to_end(call: Any) -> None:
    while await call.read() != grpc.aio.EOF:
        pass


async def hang_up(client: httpx.AsyncClient, cluster: Any, number: int) -> None:
    body = {
        "model": "hash",
        "prompt": [20 + number, *range(20, 40)],
        "max_tokens": 300,
        "stream": True,
        "seed": number,
        "ignore_eos": True,
    }
    async with client.stream("POST", f"{cluster.http_url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        await anext(response.aiter_lines())
