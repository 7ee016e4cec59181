"""New groups fetch blocks from others before requests are routed to them, and draining groups lend
theirs until they end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.group_calls import connect, submit

from quire.cluster.features.kv_exchange import gateway_warming as warming
from quire.cluster.group import service
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

FORMAT = group_pb2.KvFormat(num_layers=1, num_kv_heads=1, head_bytes=8, block_size=4)
ABLE = {"description": {"kv_format": FORMAT}}


class Peers:
    """Replaces a group's `Peers`: the test decides when a call of `Warm` returns."""

    def __init__(self) -> None:
        self.num_loans = 0
        self.asked: list[group_pb2.WarmRequest] = []
        self.is_warm = asyncio.Event()

    async def warm(self, request: group_pb2.WarmRequest) -> group_pb2.WarmResponse:
        self.asked.append(request)
        await self.is_warm.wait()
        return group_pb2.WarmResponse(num_blocks=3)

    async def lend(self, request: group_pb2.BlocksRequest) -> group_pb2.BlocksLoan:
        return group_pb2.BlocksLoan(refusal="none")


async def generate(cluster: Any) -> None:
    params = pb.SamplingParams(seed=5, max_tokens=8, ignore_eos=True)
    call = cluster.inference.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(20, 60)), sampling=params)
    )
    async for _ in call:
        pass


@contextlib.asynccontextmanager
async def one_more(
    start_cluster: Any, start_group: Any, peers: Peers, **more: Any
) -> AsyncIterator[Any]:
    """A cluster whose group holds blocks, just after another group has joined."""
    async with start_cluster(num_groups=1, **ABLE) as cluster:
        await generate(cluster)
        while not cluster.connections.loads["g0"].num_cached_blocks:
            await asyncio.sleep(0.01)
        async with start_group("g1", service={"peers": peers}, **{**ABLE, **more}) as group:
            cluster.connections.set_addresses([cluster.groups["g0"].address, group.address])
            yield cluster


async def test_a_new_group_is_routed_to_once_it_is_warm(
    start_cluster: Any, start_group: Any
) -> None:
    peers = Peers()
    async with one_more(start_cluster, start_group, peers) as cluster:
        while not peers.asked:
            await asyncio.sleep(0.01)
        (request,) = peers.asked
        (source,) = request.sources
        assert (source.group_id, source.address) == ("g0", cluster.groups["g0"].address)
        assert request.max_bytes == 200 * 16 // 2  # Half of its room.
        assert cluster.connections.num_ready == 1
        assert "g1" in cluster.connections.loads
        peers.is_warm.set()
        await cluster.wait_ready(2)


async def test_it_is_routed_to_all_the_same_where_that_takes_long(
    start_cluster: Any, start_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "WARM_S", 0.2)
    peers = Peers()
    async with one_more(start_cluster, start_group, peers) as cluster:
        await cluster.wait_ready(2)
        assert peers.asked


async def test_it_is_routed_to_at_once_where_there_is_no_other(
    start_cluster: Any, start_group: Any
) -> None:
    peers = Peers()
    async with one_more(start_cluster, start_group, peers) as cluster:
        while not peers.asked:
            await asyncio.sleep(0.01)
        await cluster.groups["g0"].kill()
        while "g0" in cluster.connections.loads:
            await asyncio.sleep(0.01)
        assert cluster.connections.num_ready == 1
        await generate(cluster)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"description": {}}, id="it exchanges none"),
        pytest.param(
            {"description": {"kv_format": group_pb2.KvFormat(num_layers=2)}},
            id="another format",
        ),
    ],
)
async def test_a_group_that_others_have_nothing_for_is_not_asked(
    start_cluster: Any, start_group: Any, more: dict[str, Any]
) -> None:
    peers = Peers()
    async with one_more(start_cluster, start_group, peers, **more) as cluster:
        await cluster.wait_ready(2)
        assert not peers.asked


async def test_a_group_that_exchanges_nothing_says_so(start_group: Any) -> None:
    async with start_group() as group, connect(group) as stub:
        assert "--kv-transfer" in (await stub.Blocks(group_pb2.BlocksRequest())).refusal
        assert "--kv-transfer" in (await stub.Warm(group_pb2.WarmRequest())).error


async def test_a_draining_group_lends_until_its_last_loan_has_ended(start_group: Any) -> None:
    peers = Peers()
    async with start_group(service={"peers": peers}) as group, connect(group) as stub:
        peers.num_loans = 1
        drained = asyncio.create_task(group.service.drain(timeout_s=60, handover_s=30))
        while not group.service._is_stopping:
            await asyncio.sleep(0.01)
        assert (await stub.Blocks(group_pb2.BlocksRequest())).refusal == "none"
        assert not drained.done()
        peers.num_loans = 0
        assert await drained == 0


async def test_it_stays_for_those_who_take_over_its_requests(
    start_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other groups ask for its blocks after the requests have left it."""
    monkeypatch.setattr(service, "_LINGER_S", 1000.0)
    async with start_group(service={"peers": Peers()}) as group, connect(group) as stub:
        group.executor.step_s = 0.02
        call = stub.Attach()
        await call.write(submit("a", [1, 2, 3], max_tokens=300))
        frame = await call.read()
        while not frame.deltas:
            frame = await call.read()
        drained = asyncio.create_task(group.service.drain(timeout_s=2000, handover_s=2000))
        while frame.phase != group_pb2.StepFrame.HANDING_OVER:
            frame = await call.read()
        abort = group_pb2.Abort(request_id="a", attempt=1)
        await call.write(group_pb2.GroupCommand(abort=abort))
        await group.settle()
        assert (await stub.Blocks(group_pb2.BlocksRequest())).refusal == "none"
        assert not drained.done()
        drained.cancel()
