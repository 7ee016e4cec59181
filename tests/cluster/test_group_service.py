"""The group's service for gateways: streams, their ends, and refusals."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.cluster.group_calls import connect, read_deltas, read_to_end, submit, tokens

from quire.cluster.group import session as attachment
from quire.v1 import group_pb2 as pb
from quire.v1 import inference_pb2

pytestmark = pytest.mark.anyio


async def test_a_group_says_who_it_is(start_group: Any) -> None:
    async with start_group("g7") as group, connect(group) as stub:
        description = await stub.Describe(pb.DescribeRequest())
    assert (description.group_id, description.block_size, description.model) == ("g7", 4, "hash")


async def test_requests_of_one_gateway_share_a_stream(start_group: Any, model: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        call = stub.Attach()
        await call.write(submit("a", [20, 21, 22]))
        await call.write(submit("b", [30]))
        expected = {
            "a": model.continuation([20, 21, 22], seed=1, max_tokens=10),
            "b": model.continuation([30], seed=1, max_tokens=10),
        }
        found: dict[str, list[int]] = {"a": [], "b": []}
        num_frames = 0
        while any(len(ids) < 10 for ids in found.values()):
            frame = await call.read()
            num_frames += bool(frame.deltas)
            for delta in frame.deltas:
                assert delta.token_offset == len(found[delta.request_id])
                found[delta.request_id] += delta.token_ids
        assert found == expected
        assert num_frames <= group.executor.num_steps + 1, "one frame per step at most"


async def test_each_gateway_sees_its_own_requests_only(start_group: Any, model: Any) -> None:
    async with start_group() as group, connect(group) as one, connect(group) as two:
        calls = [one.Attach(), two.Attach()]
        for number, call in enumerate(calls):
            await call.write(submit("same name", [20 + number]))
        for number, call in enumerate(calls):
            expected = model.continuation([20 + number], seed=1, max_tokens=10)
            assert tokens(await read_deltas(call, "same name")) == expected


async def test_a_resumed_request_goes_on_behind_what_is_there(start_group: Any, model: Any) -> None:
    expected = model.continuation([20, 21], seed=1, max_tokens=10)
    async with start_group() as group, connect(group) as stub:
        call = stub.Attach()
        await call.write(submit("a", [20, 21], resumed=expected[:6]))
        deltas = await read_deltas(call, "a")
    assert deltas[0].token_offset == 6
    assert tokens(deltas) == expected[6:]
    assert deltas[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH


async def test_a_priority_reaches_the_engine(
    start_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_group() as group, connect(group) as stub:
        add, seen = group.engine.add_request, []

        def see(request: Any) -> None:
            seen.append(request.priority)
            add(request)

        monkeypatch.setattr(group.engine, "add_request", see)
        call = stub.Attach()
        for name, priority in (("a", 0), ("b", -3)):
            await call.write(submit(name, [20], priority=priority))
            await read_deltas(call, name)
    assert seen == [0, -3]


async def test_an_abort_ends_a_request_at_once(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        group.executor.step_s = 0.1
        call = stub.Attach()
        await call.write(submit("a", [20], max_tokens=300))
        while not (await call.read()).deltas:
            pass
        await call.write(pb.GroupCommand(abort=pb.Abort(request_id="a", attempt=1)))
        await call.write(pb.GroupCommand(abort=pb.Abort(request_id="unknown", attempt=1)))
        await group.settle()
        assert group.executor.num_steps < 300


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_stream_that_ends_takes_its_requests_with_it(start_group: Any, how: str) -> None:
    async with start_group() as group, connect(group) as stub:
        group.executor.step_s = 0.1
        call = stub.Attach()
        for name in "abc":
            await call.write(submit(name, [20], max_tokens=300))
        while not (await call.read()).deltas:
            pass
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
        while group.engine_loop.num_requests:
            await asyncio.sleep(0.01)
        await group.settle()
        assert group.executor.num_steps < 300


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (submit("a", []), "INVALID_REQUEST", "prompt is empty"),
        (submit("a", [10_000]), "INVALID_REQUEST", "10000"),
        (submit("a", [20] * 395), "INVALID_REQUEST", "405 tokens"),
        (
            pb.GroupCommand(submit=pb.Submit(request_id="a", work=b"12345")),
            "INVALID_REQUEST",
            "work of 5 bytes is broken",
        ),
    ],
)
async def test_a_bad_request_is_refused_and_others_go_on(
    start_group: Any, command: pb.GroupCommand, code: str, words: str
) -> None:
    async with start_group() as group, connect(group) as stub:
        call = stub.Attach()
        await call.write(submit("good", [20]))
        await call.write(command)
        (refused,) = await read_deltas(call, "a")
        assert refused.error.code == pb.GroupError.Code.Value(code)
        assert words in refused.error.message
        await call.write(submit("also good", [20]))
        assert len(tokens(await read_deltas(call, "also good"))) == 10


async def test_what_nobody_foresaw_in_a_command_is_logged_and_counts_as_a_death(
    start_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("nobody foresaw this")

    async with start_group() as group, connect(group) as stub:
        monkeypatch.setattr(attachment, "prepared_of", fail)
        call = stub.Attach()
        await call.write(submit("a", [20]))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_to_end(call)
        assert group.service.num_requests == 0
    # Not a clean end, after which all requests would be retried without blame.
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "nobody foresaw this" in caplog.text


async def test_a_prompt_may_be_longer_than_grpc_takes_by_default(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        call = stub.Attach()
        await call.write(submit("long", [20] * 2_000_000))
        (delta,) = await read_deltas(call, "long")
    assert delta.error.code == pb.GroupError.INVALID_REQUEST  # The model's limit, not gRPC's.


async def test_the_same_attempt_is_not_taken_twice_and_not_harmed(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        group.executor.step_s = 0.005
        call = stub.Attach()
        for _ in range(2):
            await call.write(submit("a", [20], max_tokens=100))
        deltas = await read_deltas(call, "a")
        assert len(tokens(deltas)) == 100


async def test_a_full_queue_and_a_draining_group_say_so(start_group: Any) -> None:
    async with start_group(max_num_waiting=1, max_num_seqs=1) as group, connect(group) as stub:
        group.executor.step_s = 0.1
        call = stub.Attach()
        await call.write(submit("running", [20], max_tokens=200))
        while not (await call.read()).deltas:
            pass
        for name in ("waiting", "full"):
            await call.write(submit(name, [20], max_tokens=200))
        (full,) = await read_deltas(call, "full")
        assert full.error.code == pb.GroupError.QUEUE_FULL
        drained = asyncio.create_task(group.service.drain(timeout_s=60))
        await asyncio.sleep(0)
        await call.write(submit("late", [20]))
        (late,) = await read_deltas(call, "late")
        assert late.error.code == pb.GroupError.DRAINING
        call.cancel()
        await drained
