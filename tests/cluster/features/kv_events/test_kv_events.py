"""The KV event stream for other routers, read through smg-grpc-proto's stubs.

`Twin` is a trivial subscriber: it applies events, checks that no sequence number is missing, and is
compared with the engines' own blocks.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from tests.cluster.test_grpc_errors import details, refusal

from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.features.kv_events import stream as kv_events
from quire.cluster.features.kv_events.stream import KvEventsConfig
from quire.cluster.features.vllm_grpc import servicer as vllm_grpc
from quire.cluster.wire import events_from_proto
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.events import DIGEST_BYTES, BlocksRemoved, Digest, EventBatch
from quire.worker.group_engine import GroupEngine

pytestmark = pytest.mark.anyio

TIERS = [
    (common.KV_CACHE_TIER_DEVICE, "GPU"),
    (common.KV_CACHE_TIER_HOST, "CPU"),
    (common.KV_CACHE_TIER_DISK, "STORAGE"),
]


class Held(NamedTuple):
    tier: int
    parent: int | None
    token_ids: tuple[int, ...]
    salt: str
    adapter: str


Blocks = dict[int, Held]


@dataclass
class Twin:
    """Blocks according to the stream, by rank."""

    blocks: dict[int, Blocks] = field(default_factory=dict)
    sequence_numbers: dict[int, int] = field(default_factory=dict)
    chunks: list[common.KvSnapshotChunk] = field(default_factory=list)
    loads: list[common.EngineLoad] = field(default_factory=list)

    def take(self, batch: common.KvEventBatch) -> None:
        rank, last = batch.dp_rank, self.sequence_numbers.get(batch.dp_rank, 0)
        self.loads.append(batch.load)
        if batch.load.load_only:
            assert (batch.sequence_number, len(batch.events)) == (last, 0)
            return
        assert batch.sequence_number == last + 1
        self.sequence_numbers[rank] = last + 1
        if batch.HasField("snapshot"):
            self.chunks.append(batch.snapshot)
            assert batch.snapshot.index == last
            assert (batch.events[0].WhichOneof("data") == "cleared") == (last == 0)
        held = self.blocks.setdefault(rank, {})
        for event in batch.events:
            assert (event.event_id == 0) == batch.HasField("snapshot")
            match event.WhichOneof("data"):
                case "stored":
                    store(held, event.stored)
                case "removed":
                    for key in event.removed.block_hashes:
                        assert TIERS[held.pop(key).tier][0] == event.removed.tier
                case _:
                    assert not held


def store(held: Blocks, stored: common.KvBlocksStored) -> None:
    parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
    for block in stored.blocks:
        assert block.block_hash not in held, "it was told already"
        assert parent is None or parent in held, "its parent is not known"
        assert block.block_size == len(block.token_ids)
        tier = block.cache_level
        assert (stored.tier, stored.medium) == TIERS[tier]
        held[block.block_hash] = Held(
            tier, parent, tuple(block.token_ids), stored.cache_salt, stored.lora_name
        )
        parent = block.block_hash


def key(name: bytes | None) -> int | None:
    return None if name is None else int.from_bytes(name[:8], "little", signed=True)


def blocks_of(engine: GroupEngine) -> Blocks:
    """An engine's blocks, each in its fastest tier."""
    contents, snapshot = engine.events.contents, engine.events.snapshot()
    assert contents is not None
    assert snapshot.snapshot is not None
    blocks: Blocks = {}
    for tier, names in enumerate((snapshot.snapshot, *snapshot.slower)):
        for name in names:
            content = contents[name]
            tokens = tuple(np.frombuffer(content.token_ids, dtype="<u4").tolist())
            name_key = key(name)
            assert name_key is not None
            blocks[name_key] = Held(
                tier, key(content.parent), tokens, content.cache_salt, content.adapter
            )
    return blocks


@contextlib.asynccontextmanager
async def subscribed(cluster: Any, **request: Any) -> AsyncIterator[tuple[Twin, Any]]:
    """A subscriber that reads continuously, and its call."""
    twin = Twin()
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(**request))

        async def read() -> None:
            async for batch in call:
                twin.take(batch)

        reader = asyncio.create_task(read())
        try:
            yield twin, reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def until(reader: asyncio.Task[None], holds: Callable[[], bool]) -> None:
    """Returns once ``holds`` is true; raises the reader's error, if any."""
    while True:
        if reader.done():
            reader.result()
            raise AssertionError("the stream ended")
        if holds():
            return
        await asyncio.sleep(0.01)


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


async def generate(cluster: Any, *token_ids: int, max_tokens: int = 4, salt: str = "") -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
        cache_salt=salt,
    )
    async for _ in cluster.inference.Generate(request):
        pass


async def state(*groups: Any) -> list[Blocks]:
    """Blocks of the groups' engines, without empty ones."""
    each = [await group.engine_loop.call(blocks_of) for group in groups]
    return sorted((blocks for blocks in each if blocks), key=sorted)


async def until_told(twin: Twin, reader: asyncio.Task[None], *groups: Any) -> None:
    """Returns once ``twin`` has exactly the blocks of ``groups``."""
    while told(twin) != await state(*groups):
        await until(reader, lambda: True)
        await asyncio.sleep(0.01)


def told(twin: Twin) -> list[Blocks]:
    return sorted((blocks for blocks in twin.blocks.values() if blocks), key=sorted)


async def test_a_snapshot_and_then_events_tell_every_block_of_every_group(
    start_cluster: Any,
) -> None:
    async with start_cluster(kv_events=True) as cluster:
        for first in range(20, 26):
            await generate(cluster, *range(first, first + 40), salt="s" * (first % 2))
        async with subscribed(cluster) as (twin, reader):
            await until_told(twin, reader, *cluster.groups.values())
            assert [chunk.index for chunk in twin.chunks] == [0]
            sizes = map(len, await state(*cluster.groups.values()))
            assert twin.chunks[0].blocks in sizes
            for first in range(60, 66):
                await generate(cluster, *range(first, first + 30))
                await generate(cluster, *range(20, 60), first)
            await until_told(twin, reader, *cluster.groups.values())
            assert sorted(twin.blocks) == [0, 1]
            assert {held.salt for blocks in told(twin) for held in blocks.values()} == {"", "s"}


async def test_blocks_are_told_under_eviction_and_in_their_tiers(start_cluster: Any) -> None:
    block_bytes = 4 * 8
    async with start_cluster(
        num_groups=1,
        kv_events=True,
        num_blocks=24,
        model_len=80,
        kv_offloading_size=24 * block_bytes / 2**30,
    ) as cluster:
        async with subscribed(cluster) as (twin, reader):
            for first in [*range(20, 36), *range(20, 36, 3)]:
                await generate(cluster, *range(first, first + 40))
            await until_told(twin, reader, *cluster.groups.values())
        (blocks,) = told(twin)
        assert {held.tier for held in blocks.values()} == {0, 1}
        assert len(blocks) < 200


async def test_a_group_that_comes_is_a_rank_of_its_own_and_one_that_goes_has_no_blocks(
    start_cluster: Any, start_group: Any
) -> None:
    async with start_cluster(num_groups=1, kv_events=True) as cluster:
        await generate(cluster, *range(20, 60))
        async with subscribed(cluster) as (twin, reader), start_group("g9", kv_events=True) as g9:
            await until_told(twin, reader, *cluster.groups.values())
            addresses = [cluster.groups["g0"].address, g9.address]
            cluster.connections.set_addresses(addresses)
            await cluster.wait_ready(2)
            cluster.connections.set_addresses(addresses[1:])
            await until(reader, lambda: told(twin) == [])
            await generate(cluster, *range(70, 99))
            await until_told(twin, reader, g9)
            assert len(twin.blocks[1]) > 0, "ranks are not given twice"
            assert len(twin.chunks) == 1


@pytest.mark.parametrize("loses", ["an event", "the digest"])
async def test_what_goes_wrong_on_the_way_is_found_by_the_digest(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
    broken: list[EventBatch] = []

    def break_one(message: group_pb2.EventBatch) -> EventBatch:
        batch = events_from_proto(message)
        if not batch.events or broken:
            return batch
        broken.append(batch)
        if loses == "an event":
            return replace(batch, events=(BlocksRemoved(()), *batch.events[1:]))
        return replace(batch, digest=Digest(bytes(DIGEST_BYTES)))

    async with (
        start_cluster(num_groups=1, kv_events=True) as cluster,
        subscribed(cluster) as (twin, reader),
    ):
        await generate(cluster, *range(20, 60))
        await until_told(twin, reader, *cluster.groups.values())
        monkeypatch.setattr(kv_events, "events_from_proto", break_one)
        await generate(cluster, *range(70, 99))
        await until(reader, lambda: bool(broken))
        await until_told(twin, reader, *cluster.groups.values())
        assert len(twin.chunks) == 1, "what differs is told, and not all again"


async def test_a_subscriber_for_whom_a_group_has_told_too_much_hears_what_differs(
    start_cluster: Any,
) -> None:
    """The group's feed drops unread events and sends a snapshot."""
    async with (
        start_cluster(
            num_groups=1, kv_events=True, service={"buffer_events": 1}, num_blocks=60, model_len=200
        ) as cluster,
        subscribed(cluster) as (twin, reader),
    ):
        for first in range(20, 40):
            await generate(cluster, *range(first, first + 40))
        await until_told(twin, reader, *cluster.groups.values())
        assert len(twin.chunks) == 1


async def test_a_subscriber_that_comes_back_is_told_to_begin_again(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, kv_events=True) as cluster:
        async with subscribed(cluster, start_sequence_number=7) as (_, reader):
            error = await refusal(reader)
        assert error.code() is grpc.StatusCode.OUT_OF_RANGE
        assert "start_sequence_number=7" in str(error.details())


async def test_without_the_setting_it_is_refused_and_nothing_is_remembered(
    start_cluster: Any,
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        await generate(cluster, *range(20, 60))
        assert cluster.groups["g0"].engine.events.contents is None
        async with subscribed(cluster) as (_, reader):
            error = await refusal(reader)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "--kv-events" in str(error.details())
        assert details(error)["ErrorInfo"].reason == "UNIMPLEMENTED"


async def test_only_operators_see_the_tokens_of_all_tenants(start_cluster: Any) -> None:
    keys = ApiKeys({"mine": Caller(tenant="a")})
    async with (
        start_cluster(num_groups=1, keys=keys, kv_events=True) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.SubscribeKvEvents(
            common.SubscribeKvEventsRequest(), metadata=(("authorization", "Bearer mine"),)
        )
        assert (await refusal(call.read())).code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes the gateways' settings for subscriptions."""

    def set_(**settings: Any) -> None:
        monkeypatch.setattr(vllm_grpc, "KvEventsConfig", lambda: KvEventsConfig(**settings))

    return set_


async def test_a_subscriber_that_reads_nothing_is_cut_off(
    start_cluster: Any, hurried: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried(stall_s=0.5, heartbeat_s=0.001)
    is_over = asyncio.Event()

    class Watched(kv_events.Subscription):
        async def run(self, *given: Any) -> None:
            try:
                await super().run(*given)
            finally:
                is_over.set()

    monkeypatch.setattr(vllm_grpc, "Subscription", Watched)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        start_cluster(num_groups=1, kv_events=True) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address, options=options) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
        batches = aiter(stub.SubscribeKvEvents(request))
        await anext(batches)
        await is_over.wait()
        error = await refusal(read_all(batches))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_gateway_has_a_bounded_number_of_subscribers(
    start_cluster: Any, hurried: Callable[..., None]
) -> None:
    hurried(max_subscribers=1)
    async with start_cluster(num_groups=1, kv_events=True) as cluster:
        async with subscribed(cluster) as (twin, first):
            await until(first, lambda: bool(twin.chunks))
            async with subscribed(cluster) as (_, reader):
                error = await refusal(reader)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        while True:  # Until the gateway has noticed that the first one left.
            async with subscribed(cluster) as (twin, second):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await until(second, lambda: bool(twin.chunks))
                    break


async def test_a_stream_whose_first_snapshot_breaks_off_ends(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(message: group_pb2.EventBatch) -> EventBatch:
        raise ValueError("the snapshot is broken")

    monkeypatch.setattr(kv_events, "events_from_proto", break_off)
    async with (
        start_cluster(num_groups=1, kv_events=True) as cluster,
        subscribed(cluster) as (twin, reader),
    ):
        error = await refusal(reader)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "begin again" in str(error.details())
        assert not twin.chunks


async def test_loads_come_with_batches_and_alone(
    start_cluster: Any, hurried: Callable[..., None]
) -> None:
    hurried(heartbeat_s=0.05)
    async with start_cluster(num_groups=1, kv_events=True) as cluster:
        async with subscribed(cluster, load_records_before_first_batch=True) as (twin, reader):
            await generate(cluster, *range(20, 60))
            await until(reader, lambda: len(twin.loads) > 6)
            await until_told(twin, reader, *cluster.groups.values())
        samples = [load.sample for load in twin.loads]
        assert samples == sorted(set(samples))
        assert {load.load_only for load in twin.loads} == {True, False}
        assert all(load.max_running_requests == 16 for load in twin.loads)


async def test_a_gateway_that_stops_ends_the_stream(
    start_cluster: Any, hurried: Callable[..., None]
) -> None:
    hurried(heartbeat_s=0.05)
    async with (
        start_cluster(num_groups=1, kv_events=True) as cluster,
        subscribed(cluster) as (twin, reader),
    ):
        await until(reader, lambda: bool(twin.chunks))
        cluster.models.begin_drain()
        assert (await refusal(reader)).code() is grpc.StatusCode.UNAVAILABLE
