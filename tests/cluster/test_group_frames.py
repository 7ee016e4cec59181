"""Frames of a group report its load and the number of gateways."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.group_calls import connect, read_deltas, submit

from quire.cluster.group.session import Door, GatewaySession
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import RankFailure

pytestmark = pytest.mark.anyio


async def test_frames_carry_the_load_and_come_without_work_too(start_group: Any) -> None:
    async with start_group(num_blocks=50) as group, connect(group) as stub:
        call = stub.Attach()
        first, second = await call.read(), await call.read()
        assert (first.load.num_free_blocks, second.load.num_free_blocks) == (50, 50)
        await call.write(submit("a", [20] * 9))
        await read_deltas(call, "a")
        load = (await call.read()).load
        assert (load.num_running, load.num_held_blocks) == (0, 0)
        assert load.num_cached_blocks + load.num_free_blocks == 50
        assert (load.num_prompt_tokens, load.num_output_tokens) == (9, 10)


async def test_each_gateway_hears_of_each_step_with_prompts_that_gave_no_token(
    start_group: Any,
) -> None:
    async with (
        start_group(service={"heartbeat_s": 600}) as group,
        connect(group) as one,
        connect(group) as two,
    ):
        may_step, execute = threading.Semaphore(0), group.executor.execute
        group.executor.execute = lambda step: (may_step.acquire(), execute(step))[1]
        asking, other = one.Attach(), two.Attach()
        await asking.read()
        await other.read()
        await asking.write(submit("a", [20] * 200, max_tokens=1))
        for pending in (136, 72, 8, 0):  # 64 tokens to a step.
            may_step.release()
            for call in (asking, other):
                frame = await call.read()
                assert frame.load.num_pending_prefill_tokens == pending
        assert not frame.deltas


async def read_until_gateways(call: Any, num_gateways: int) -> None:
    """Reads frames until they report ``num_gateways``; pytest's timeout is the limit."""
    while (await call.read()).load.num_gateways != num_gateways:
        pass


async def test_frames_say_how_many_gateways_there_are_as_they_come_and_go(
    start_group: Any,
) -> None:
    async with start_group() as group, connect(group) as stub:
        one, two, three = stub.Attach(), stub.Attach(), stub.Attach()
        await read_until_gateways(one, 3)
        await read_until_gateways(two, 3)
        two.cancel()
        await read_until_gateways(one, 2)
        await three.write(pb.GroupCommand(is_draining=True))
        await read_until_gateways(one, 1)
        await read_until_gateways(three, 1)
        four = stub.Attach()
        await read_until_gateways(four, 2)
        await read_until_gateways(one, 2)


async def test_a_silent_gateway_does_not_count_long_before_it_is_given_up(
    start_group: Any,
) -> None:
    """It may have lost its connection and returned over another."""
    async with start_group() as group:
        attachment = GatewaySession(group.engine_loop, Door(), name="silent")
        assert attachment.may_submit
        listening = asyncio.create_task(attachment.listen(0.04))
        while attachment.may_submit:
            await asyncio.sleep(0)
        assert not listening.done()
        listening.cancel()

        async def ping() -> AsyncIterator[Any]:
            yield pb.GroupCommand()

        await attachment.read(ping())
        assert attachment.may_submit


async def test_frames_say_how_many_submits_their_load_counts(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        group.executor.step_s = 0.1
        call = stub.Attach()
        await call.write(submit("a", [20], max_tokens=300))
        await call.write(submit("never begun", []))
        num_submits = 0
        while num_submits < 2:
            frame = await call.read()
            assert frame.num_submits >= num_submits
            num_submits = frame.num_submits
            assert not num_submits or frame.load.num_running + frame.load.num_waiting == 1


async def later_attempt() -> AsyncIterator[Any]:
    command = submit("a", [20, 21], resumed=[22])
    command.submit.attempt = 2
    yield command


async def test_a_later_attempt_is_acknowledged_before_the_engine_has_it(start_group: Any) -> None:
    async with start_group() as group:
        attachment = GatewaySession(group.engine_loop, Door(), name="gateway")
        await attachment.read(later_attempt())
        frame = attachment.take_frame()
        (delta,) = frame.deltas
        assert (delta.request_id, delta.attempt, delta.token_offset) == ("a", 2, 1)
        assert not delta.token_ids
        assert not delta.HasField("error")
        assert (group.engine_loop.num_submitted, frame.num_submits) == (0, 0)
        attachment.take_frame()  # The first frame has been written.
        assert group.engine_loop.num_submitted == 1
        attachment.close()


async def test_a_later_attempt_that_is_aborted_before_it_begins_never_does(
    start_group: Any,
) -> None:
    async with start_group() as group:
        attachment = GatewaySession(group.engine_loop, Door(), name="gateway")
        await attachment.read(later_attempt())
        attachment.take_frame()
        attachment.close()
        assert not attachment.take_frame().deltas
        assert group.engine_loop.num_submitted == 0


async def test_a_group_that_fails_before_it_begins_a_later_attempt_does_not_accuse_it(
    start_group: Any,
) -> None:
    async with start_group() as group:
        attachment = GatewaySession(group.engine_loop, Door(), name="gateway")
        await attachment.read(later_attempt())
        attachment.take_frame()
        group.engine_loop._fail(RankFailure("died of something else"))
        await group.engine_loop.failed
        (delta,) = attachment.take_frame().deltas
        assert delta.error.code == pb.GroupError.DRAINING
        assert "had failed before" in delta.error.message
        assert attachment.num_requests == 0
