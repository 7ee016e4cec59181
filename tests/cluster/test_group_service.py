import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from quire.cluster.group import attachment
from quire.cluster.group.attachment import Attachment, Door
from quire.cluster.wire import events_from_proto, tokens_to_bytes
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc, inference_pb2
from quire.worker.events import BlocksStored, EventBatch
from quire.worker.hashing import hash_blocks, root_hash

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connect(group: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(group.address) as channel:
        yield group_pb2_grpc.ReplicaGroupStub(channel)


def submit(
    name: str, prompt: list[int], *, resumed: list[int] | None = None, **sampling: Any
) -> Any:
    params = {"seed": 1, "max_tokens": 10, "ignore_eos": True, **sampling}
    return pb.GroupCommand(
        submit=pb.Submit(
            request_id=name,
            attempt=1,
            prompt_token_ids=tokens_to_bytes(prompt),
            resumed_token_ids=tokens_to_bytes(resumed or []),
            sampling=inference_pb2.SamplingParams(**params),
        )
    )


async def read_deltas(call: Any, name: str) -> list[pb.TokenDelta]:
    """Reads frames until the request ended; returns its deltas."""
    deltas: list[pb.TokenDelta] = []
    while not deltas or not (deltas[-1].finish_reason or deltas[-1].HasField("error")):
        frame = await call.read()
        deltas += [delta for delta in frame.deltas if delta.request_id == name]
    return deltas


async def read_to_end(call: Any) -> None:
    while await call.read() != grpc.aio.EOF:
        pass


def tokens(deltas: list[pb.TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


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
            command = submit(name, [20])
            command.submit.priority = priority
            await call.write(command)
            await read_deltas(call, name)
    assert seen == [0, -3]


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
    """Reads frames until they say that there are so many; pytest's patience is the limit."""
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
    """It may have lost its connection and come back over another."""
    async with start_group() as group:
        attachment = Attachment(group.engine_loop, Door(), name="silent")
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
        (submit("a", [20], top_p=2), "INVALID_REQUEST", "top_p=2.0"),
        (
            pb.GroupCommand(submit=pb.Submit(request_id="a", prompt_token_ids=b"12345")),
            "INVALID_REQUEST",
            "5 bytes",
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
    def fail(message: object) -> Any:
        raise RuntimeError("nobody foresaw this")

    async with start_group() as group, connect(group) as stub:
        monkeypatch.setattr(attachment, "params_from_proto", fail)
        call = stub.Attach()
        await call.write(submit("a", [20]))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_to_end(call)
        assert group.service.num_requests == 0
    # Not an end in peace, which would blame nobody, and be tried again with all that was on it.
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "nobody foresaw this" in caplog.text


async def test_a_prompt_may_be_longer_than_grpc_takes_by_default(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        call = stub.Attach()
        await call.write(submit("long", [20] * 2_000_000))
        (delta,) = await read_deltas(call, "long")
    assert delta.error.code == pb.GroupError.INVALID_REQUEST  # This model's limit, and not gRPC's.


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
    """Not with the next heartbeat, until which they would send requests there."""
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
    """It is told what one is told that comes to a draining group, which counts for nothing."""
    async with start_group() as group, connect(group) as stub:
        group.executor.fails = True
        call = stub.Attach()
        await call.write(submit("killer", [20]))
        (delta,) = await read_deltas(call, "killer")
        assert delta.error.code == pb.GroupError.GROUP_FAILED
        attachment = Attachment(group.engine_loop, Door(), name="late")

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
        attachment = Attachment(group.engine_loop, Door(), name="slow")

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


async def next_batch(call: Any) -> EventBatch:
    """The next batch that says anything."""
    while True:
        batch = events_from_proto(await call.read())
        if batch.events or batch.snapshot is not None:
            return batch


async def test_events_begin_with_a_snapshot_and_go_on_from_there(start_group: Any) -> None:
    prompt = list(range(20, 33))
    async with start_group() as group, connect(group) as stub:
        work = stub.Attach()
        await work.write(submit("a", prompt, max_tokens=2))
        await read_deltas(work, "a")
        events = stub.Events(pb.EventsRequest())
        snapshot = await next_batch(events)
        root = root_hash(model_fingerprint="hash-1", kv_dtype="float32", block_size=4)
        hashes = hash_blocks(np.array(prompt, dtype=np.uint32), block_size=4, root=root)
        assert snapshot.snapshot is not None
        assert set(snapshot.snapshot) == set(hashes)
        assert (snapshot.epoch, snapshot.first_seq) == (group.engine.events.epoch, 1)

        await work.write(submit("b", [*prompt, 50, 51, 52, 53], max_tokens=2))
        await read_deltas(work, "b")
        batch = await next_batch(events)
        assert batch.first_seq == snapshot.first_seq
        assert all(isinstance(event, BlocksStored) for event in batch.events)


async def test_a_subscriber_that_was_away_is_told_what_it_missed(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        work = stub.Attach()
        await work.write(submit("a", [20] * 9, max_tokens=2))
        await read_deltas(work, "a")
        epoch = group.engine.events.epoch
        replay = await next_batch(stub.Events(pb.EventsRequest(epoch=epoch, next_seq=0)))
        assert replay.first_seq == 0
        assert replay.snapshot is None
        assert len(replay.events) == 1
        other_epoch = stub.Events(pb.EventsRequest(epoch=epoch + 1, next_seq=0))
        assert (await next_batch(other_epoch)).snapshot is not None


async def test_events_have_a_heartbeat_with_a_digest(start_group: Any) -> None:
    """Behind the last event as well: what it did not lead to shows without another one."""
    async with start_group(service={"events_heartbeat_s": 0.01}) as group, connect(group) as stub:
        work = stub.Attach()
        await work.write(submit("a", [20] * 9, max_tokens=2))
        await read_deltas(work, "a")
        log = group.engine.events
        events = stub.Events(pb.EventsRequest(epoch=log.epoch, next_seq=log.next_seq))
        for _ in range(4):  # The replay, and three heartbeats.
            batch = events_from_proto(await events.read())
            assert batch == log.since(log.next_seq)
            assert (batch.events, batch.snapshot) == ((), None)
            assert batch.digest is not None


async def test_drifted_buckets_are_told_anew_behind_the_replay(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        work = stub.Attach()
        await work.write(submit("a", list(range(20, 60)), max_tokens=2))
        await read_deltas(work, "a")
        log = group.engine.events
        buckets = bytes(range(128))
        request = pb.EventsRequest(epoch=log.epoch, next_seq=0, buckets=buckets)
        events = stub.Events(request)
        batches = [events_from_proto(await events.read()) for _ in range(2)]
        assert batches == log.replay(0, buckets=buckets)


async def test_a_subscriber_that_falls_behind_is_given_a_snapshot(start_group: Any) -> None:
    async with start_group(service={"buffer_events": 2}) as group:
        feed = group.service._feed.follow(epoch=group.engine.events.epoch, next_seq=0)
        await anext(feed)
        async with connect(group) as stub:
            work = stub.Attach()
            for number in range(6):
                await work.write(submit(f"r{number}", [20 + number] * 9, max_tokens=2))
                await read_deltas(work, f"r{number}")
        caught_up = await anext(feed)
        assert caught_up.snapshot is not None
        assert len(caught_up.snapshot) == 12
        assert caught_up.first_seq == 6
        await feed.aclose()
