import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from quire.cluster.features.autoscale.demand import Demand
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio


async def test_what_waits_is_counted_while_it_waits() -> None:
    demand = Demand()
    with demand.waiting(10):
        with contextlib.suppress(TimeoutError), demand.waiting(5):
            assert (demand.num_requests, demand.num_tokens) == (2, 15)
            raise TimeoutError  # Any end counts.
        assert (demand.num_requests, demand.num_tokens) == (1, 10)
    assert (demand.num_requests, demand.num_tokens) == (0, 0)


async def test_a_watcher_hears_of_the_first_that_waits_and_when_none_does() -> None:
    demand = Demand()
    some = asyncio.ensure_future(demand.wait_for_some())
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await asyncio.sleep(0)
    assert not some.done()
    with demand.waiting(1):
        await some
        none = asyncio.ensure_future(demand.wait_while_some(until=never))
        await asyncio.sleep(0)
        assert not none.done()
    await none


async def test_a_watcher_stops_when_it_was_answered() -> None:
    demand = Demand()
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with demand.waiting(1):
        waiting = asyncio.ensure_future(demand.wait_while_some(until=answer))
        await asyncio.sleep(0)
        answer.set_result(None)
        await waiting


async def test_requests_at_a_gateway_without_groups_are_demand_until_one_is_there(
    start_cluster: Any, start_group: Any
) -> None:
    options = {"wakes_groups": True}
    async with start_cluster(num_groups=0, group_wait_s=60, config=options) as cluster:
        assert cluster.models.is_ready
        demand = cluster.connections.demand
        sampling = pb.SamplingParams(seed=5, max_tokens=5, ignore_eos=True)
        prompt = [20, 21, 22]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        calls = [cluster.inference.Generate(request) for _ in range(3)]
        answers = [asyncio.ensure_future(collect(call)) for call in calls]
        await asyncio.wait_for(demand.wait_for_some(), 60)
        async with start_group("late") as group:
            cluster.connections.set_addresses([group.address])
            answered = await asyncio.gather(*answers)
        expected = cluster.model.continuation(prompt, seed=5, max_tokens=5)
        assert answered == [expected] * 3
        assert demand.num_requests == 0


async def test_as_many_wait_for_a_first_group_as_may_be_queued(start_cluster: Any) -> None:
    options = {"wakes_groups": True, "admission": AdmissionConfig(max_queued_requests=2)}
    async with start_cluster(num_groups=0, group_wait_s=60, config=options) as cluster:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[20]))
        calls = [cluster.inference.Generate(request) for _ in range(2)]
        answers = [asyncio.ensure_future(collect(call)) for call in calls]
        while cluster.connections.demand.num_requests < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(cluster.inference.Generate(request))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 requests wait for a first replica group, --max-queued-requests is 2" in (
            refused.value.details() or ""
        )
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)


async def collect(call: AsyncIterator[pb.GenerateResponse]) -> list[int]:
    return [token for chunk in [chunk async for chunk in call] for token in chunk.token_ids]
