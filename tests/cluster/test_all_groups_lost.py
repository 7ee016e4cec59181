"""All groups die at once under fifty streams, none of which caused it."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

NUM_STREAMS = 50
NUM_GROUPS = 3
NUM_TOKENS = 60
ROOM = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_blocks": 2000}
HOWS = ("killed", "failed in turn", "silent")
SLOW_S = 0.1  # Step time, so that no stream gets the eight tokens that clear it.


def prompt_of(number: int) -> list[int]:
    return [20 + number, *range(20, 40)]


async def begin(cluster: Any) -> list[asyncio.Task[list[int]]]:
    """Begins streams; returns once each has its first token and few more."""
    cluster.take_steps_of(SLOW_S)
    calls = [
        cluster.inference.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt_of(number)),
                sampling=pb.SamplingParams(seed=number, max_tokens=NUM_TOKENS, ignore_eos=True),
            )
        )
        for number in range(NUM_STREAMS)
    ]
    firsts = await asyncio.gather(*[anext(aiter(call)) for call in calls])
    return [
        asyncio.create_task(read_rest(call, first))
        for call, first in zip(calls, firsts, strict=True)
    ]


async def read_rest(call: Any, first: pb.GenerateResponse) -> list[int]:
    found = list(first.token_ids)
    async for chunk in call:
        assert chunk.token_offset == len(found)
        found += chunk.token_ids
    return found


def check_exact(cluster: Any, found: list[list[int]]) -> None:
    for number, tokens in enumerate(found):
        assert tokens == cluster.model.continuation(
            prompt_of(number), seed=number, max_tokens=NUM_TOKENS
        )


async def kill_all(cluster: Any, *, how: str) -> None:
    for group in cluster.groups.values():
        if how == "killed":
            await group.kill()
        elif how == "failed in turn":  # In the pause, its streams begin on the next group.
            group.executor.fails = True
            await asyncio.sleep(SLOW_S)
        else:  # As in a power failure: connections stay open, but carry nothing.
            group.service._heartbeat_s = 1e6
            group.engine_loop._deliver = lambda result: None


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
async def test_all_streams_go_on_exactly_once_groups_are_back(
    start_cluster: Any, start_group: Any, how: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(start_cluster(num_groups=NUM_GROUPS, **ROOM))
        streams = await begin(cluster)
        await kill_all(cluster, how=how)
        again = [
            await stack.enter_async_context(start_group(f"again{number}", **ROOM))
            for number in range(NUM_GROUPS)
        ]
        cluster.connections.set_addresses(group.address for group in again)
        check_exact(cluster, await asyncio.gather(*streams))
        assert cluster.gateway.telemetry.quarantined._value.get() == 0


@pytest.mark.slow
async def test_where_no_group_is_started_any_more_all_are_told_at_once(start_cluster: Any) -> None:
    """Streams under way, a request that waits for a group, and one that arrives later."""
    async with start_cluster(num_groups=NUM_GROUPS, group_wait_s=1e4, **ROOM) as cluster:
        streams = await begin(cluster)
        await kill_all(cluster, how="killed")
        while cluster.connections.num_ready:
            await cluster.connections.wait_for_change(timeout_s=60)
        waiting = asyncio.create_task(one_more(cluster))
        while not cluster.gateway.admission.queued.num_requests:
            await asyncio.sleep(0.01)
        cluster.connections.expect_no_more("the cluster stops")
        late = asyncio.create_task(one_more(cluster))
        errors = await asyncio.gather(*streams, waiting, late, return_exceptions=True)
    for error in errors:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "the cluster stops" in (error.details() or "")


async def one_more(cluster: Any) -> None:
    await cluster.inference.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[20]))).read()


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
async def test_no_stream_is_blamed_where_no_group_comes_back(start_cluster: Any, how: str) -> None:
    async with start_cluster(num_groups=NUM_GROUPS, group_wait_s=8, **ROOM) as cluster:
        streams = await begin(cluster)
        await kill_all(cluster, how=how)
        errors = await asyncio.gather(*streams, return_exceptions=True)
    codes = {error.code() for error in errors if isinstance(error, grpc.aio.AioRpcError)}
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in errors)
