"""The stream of a group's block events."""

from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.cluster.group_calls import connect, read_deltas, submit

from quire.cluster.wire import contents_from_proto, events_from_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import hash_blocks, root_hash

pytestmark = pytest.mark.anyio


async def next_batch(call: Any) -> EventBatch:
    """The next batch that is not empty."""
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
    """After the last event too, so that a wrong state shows without another event."""
    async with start_group(service={"events_heartbeat_s": 0.01}) as group, connect(group) as stub:
        work = stub.Attach()
        await work.write(submit("a", [20] * 9, max_tokens=2))
        await read_deltas(work, "a")
        log = group.engine.events
        events = stub.Events(pb.EventsRequest(epoch=log.epoch, next_seq=log.next_seq))
        for _ in range(4):  # The replay and three heartbeats.
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


async def test_tokens_come_from_groups_alone_that_remember_them(start_group: Any) -> None:
    prompt = list(range(20, 33))
    request = pb.EventsRequest(with_tokens=True)
    async with start_group(kv_events=True) as group, connect(group) as stub:
        work = stub.Attach()
        await work.write(submit("a", prompt, max_tokens=2))
        await read_deltas(work, "a")
        message = await stub.Events(request).read()
        blocks = contents_from_proto(message.contents, block_size=4)
        root = root_hash(model_fingerprint="hash-1", kv_dtype="float32", block_size=4)
        tokens = np.array(prompt, dtype=np.uint32)
        names = list(hash_blocks(tokens, block_size=4, root=root))
        assert [(name, content.parent, content.token_ids) for name, content in blocks] == [
            (name, parent, part.tobytes())
            for name, parent, part in zip(
                names, [None, *names[:-1]], tokens[:12].reshape(3, 4), strict=True
            )
        ]
        assert not (await stub.Events(pb.EventsRequest()).read()).HasField("contents")
    async with start_group() as group, connect(group) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Events(request).read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--kv-events" in str(caught.value.details())


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
