import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.cluster.links.group_client import GroupClient, GroupClientConfig
from quire.cluster.links.group_link import GroupLink
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def unreachable(address: str) -> AsyncIterator[GroupLink]:
    raise OSError(f"{address} is not there")
    yield


def attach(groups: Groups, client: GroupClient, *, epoch: int) -> None:
    client._description = group_pb2.GroupDescription(
        group_id="g0", epoch=epoch, model="m", block_size=4
    )
    groups.attached(client)


async def test_a_group_that_restarts_at_its_address_is_not_lost_with_its_former_client() -> None:
    groups = Groups(
        table=RoutingTable(block_size=4),
        expected=Expectation(model="m", block_size=4),
        connect=unreachable,
    )
    groups.set_addresses(["host:1"])
    (former, _), *_ = groups._clients.values()
    attach(groups, former, epoch=1)
    groups.detached(former)
    groups.set_addresses([])  # The group has crashed
    groups.set_addresses(["host:1"])  # and another started. Both clients connect to it.
    (present, _), *_ = groups._clients.values()
    attach(groups, present, epoch=2)
    attach(groups, former, epoch=2)
    groups.detached(former)
    assert groups.num_ready == 1
    await groups.close()


async def test_what_is_closed_attaches_to_no_group_any_more() -> None:
    groups = Groups(
        table=RoutingTable(block_size=4),
        expected=Expectation(model="m", block_size=4),
        connect=unreachable,
    )
    await groups.close()
    groups.set_addresses(["host:1"])
    assert not groups.troubles()


def with_one_group() -> tuple[Groups, GroupClient]:
    groups = Groups(
        table=RoutingTable(block_size=4),
        expected=Expectation(model="m", block_size=4),
        connect=unreachable,
    )
    groups.set_addresses(["host:1"])
    (client, _), *_ = groups._clients.values()
    attach(groups, client, epoch=1)
    return groups, client


async def test_a_frame_that_comes_late_is_no_news_of_a_groups_load() -> None:
    groups, client = with_one_group()
    seen: list[int] = []
    groups.watch_loads(
        lambda: seen.extend(each.num_output_tokens for each in groups.loads.values())
    )
    for step in (7, 8, 7, 8, 9):
        load = group_pb2.Load(num_output_tokens=10 * step)
        client._take(group_pb2.StepFrame(step=step, load=load))
    assert seen == [70, 80, 90]
    await groups.close()


async def test_a_group_that_hands_back_all_it_has_is_no_news_each_time() -> None:
    groups, client = with_one_group()
    seen: list[int] = []
    groups.watch(lambda: seen.append(groups.num_ready))
    error = group_pb2.GroupError(code=group_pb2.GroupError.DRAINING)
    deltas = [group_pb2.TokenDelta(request_id=str(number), error=error) for number in range(9)]
    client._take(group_pb2.StepFrame(deltas=deltas))
    assert seen == [0]
    await groups.close()


@pytest.mark.parametrize("name", ["silence_timeout_s", "min_backoff_s"])
@pytest.mark.parametrize("value", [0.0, math.nan])
async def test_a_time_that_cannot_work_names_itself(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}: must be above 0"):
        GroupClientConfig(**{name: value})  # type: ignore[arg-type]


async def test_a_former_group_that_still_tells_its_events_does_not_fence_off_the_present_one() -> (
    None
):
    table = RoutingTable(block_size=4)
    groups = Groups(table=table, expected=Expectation(model="m", block_size=4), connect=unreachable)
    groups.set_addresses(["host:1", "host:2"])
    (former, _), (present, _) = groups._clients.values()
    attach(groups, former, epoch=1)
    attach(groups, present, epoch=2)
    stored = BlocksStored([BlockHash(bytes(32))])
    groups.events(present, EventBatch(epoch=2, first_seq=0))
    groups.events(former, EventBatch(epoch=1, first_seq=0))  # It drains, but lives.
    groups.events(present, EventBatch(epoch=2, first_seq=0, events=(stored,)))
    assert table.stats().directory.num_blocks == 1
    await groups.close()


class _Link:
    """A group whose calls answer a cancellation with a status that arrived at the same moment, as
    gRPC's may."""

    def __init__(self, waits_in: str) -> None:
        self.waits_in = waits_in
        self.is_waiting = asyncio.Event()

    async def Describe(self, request: object, *, timeout: float) -> group_pb2.GroupDescription:
        return group_pb2.GroupDescription(group_id="g0", epoch=1, model="m", block_size=4)

    async def _frames(self, *frames: group_pb2.StepFrame, waits: bool) -> AsyncIterator[Any]:
        for frame in frames:
            yield frame
        try:
            if waits:
                self.is_waiting.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if waits:
                metadata = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE, metadata, metadata, "the group is gone"
                ) from None
            raise

    def Attach(self) -> Any:
        call: Any = self._frames(group_pb2.StepFrame(), waits=self.waits_in == "Attach")

        class Call:
            def __aiter__(self) -> Any:
                return call

            async def write(self, command: object) -> None:
                pass

        return Call()

    def Events(self, request: object) -> Any:
        return self._frames(waits=self.waits_in == "Events")


@pytest.mark.parametrize("waits_in", ["Attach", "Events"])
async def test_what_is_closed_ends_also_where_a_call_ends_at_that_moment(waits_in: str) -> None:
    link = _Link(waits_in)

    @contextlib.asynccontextmanager
    async def connect(address: str) -> AsyncIterator[Any]:
        yield link

    groups = Groups(
        table=RoutingTable(block_size=4),
        expected=Expectation(model="m", block_size=4),
        connect=connect,
    )
    groups.set_addresses(["host:1"])
    await link.is_waiting.wait()
    await asyncio.wait_for(groups.close(), 30)
