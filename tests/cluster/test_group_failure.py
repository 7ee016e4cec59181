"""Reports of a failing group to its gateways."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.cluster.group_calls import connect, read_deltas, read_to_end, submit

from quire.cluster.group.session import Door, GatewaySession
from quire.v1 import group_pb2 as pb

pytestmark = pytest.mark.anyio


async def test_a_failed_rank_fails_every_request_and_the_stream(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        group.executor.step_s = 0.1
        call = stub.Attach()
        await call.write(submit("a", [20], max_tokens=300))
        while not (await call.read()).deltas:
            pass
        group.executor.fails = True
        deltas = await read_deltas(call, "a")
        assert deltas[-1].error.code == pb.GroupError.GROUP_FAILED
        assert deltas[-1].error.message == "rank 1 died"
        with pytest.raises(grpc.aio.AioRpcError, match="rank 1 died") as raised:
            await read_to_end(call)
        with pytest.raises(grpc.aio.AioRpcError, match="rank 1 died"):
            await stub.Attach().read()
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_gateways_without_requests_learn_at_once_that_a_group_failed(
    start_group: Any,
) -> None:
    """Not only with the next heartbeat, until which they would send requests there."""
    async with start_group(service={"heartbeat_s": 1000.0}) as group, connect(group) as stub:
        idle, busy = stub.Attach(), stub.Attach()
        await idle.read()
        group.executor.fails = True
        await busy.write(submit("a", [20]))
        with pytest.raises(grpc.aio.AioRpcError, match="rank 1 died"):
            await read_to_end(idle)


async def test_a_request_that_comes_after_a_groups_failure_is_not_to_blame(
    start_group: Any,
) -> None:
    """It gets the error of a draining group, which does not count as a death."""
    async with start_group() as group, connect(group) as stub:
        group.executor.fails = True
        call = stub.Attach()
        await call.write(submit("killer", [20]))
        (delta,) = await read_deltas(call, "killer")
        assert delta.error.code == pb.GroupError.GROUP_FAILED
        attachment = GatewaySession(group.engine_loop, Door(), name="late")

        async def commands() -> AsyncIterator[Any]:
            yield submit("late", [20])

        await attachment.read(commands())
        (delta,) = attachment.take_frame().deltas
        assert delta.error.code == pb.GroupError.DRAINING
        assert "rank 1 died" in delta.error.message


async def test_tokens_that_were_not_sent_when_a_group_fails_come_before_the_error(
    start_group: Any, model: Any
) -> None:
    async with start_group() as group:
        group.executor.step_s = 0.05
        attachment = GatewaySession(group.engine_loop, Door(), name="slow")

        async def commands() -> AsyncIterator[Any]:
            yield submit("a", [20], max_tokens=300)

        await attachment.read(commands())
        while attachment.num_unsent_tokens < 5:
            await asyncio.sleep(0.01)
        group.executor.fails = True
        await group.engine_loop.failed
        last, error = attachment.take_frame().deltas
        assert error.error.code == pb.GroupError.GROUP_FAILED
        num_tokens = len(last.token_ids)
        assert num_tokens >= 5
        assert list(last.token_ids) == model.continuation([20], seed=1, max_tokens=num_tokens)
        assert attachment.num_unsent_tokens == attachment.num_requests == 0
