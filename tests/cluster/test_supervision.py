"""Background tasks: failures are logged, and the task continues or ends what depends on it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sim.loop import SimLoop, simulate

from quire.cluster.errors import GroupLost
from quire.cluster.links.event_reader import read_events
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.supervise import keep_going
from quire.router.prefix_index.directory import GroupId, Position
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb


def test_what_fails_is_logged_with_its_stack_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    async def work() -> None:
        calls.append(1)
        if len(calls) < 4:
            raise RuntimeError("nobody foresaw this")

    simulate(lambda loop: keep_going(work, name="the work"), seed=1)
    assert len(calls) == 4
    (record,) = caplog.records
    assert "the work failed" in record.message
    assert record.exc_info is not None


def test_work_that_fails_while_it_is_cancelled_is_not_begun_again() -> None:
    calls: list[int] = []

    async def work() -> None:
        calls.append(1)
        try:
            await asyncio.sleep(1000)
        finally:
            raise RuntimeError("the cleanup failed")

    async def main(_: SimLoop) -> None:
        task = asyncio.create_task(keep_going(work, name="the work"))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task], timeout=100)
        assert task.cancelled()

    simulate(main, seed=1)
    assert len(calls) == 1


def test_a_gateway_keeps_house_though_it_failed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(loop: SimLoop) -> int:
        table, calls = RoutingTable(block_size=4), []

        def expire() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("nobody foresaw this")

        monkeypatch.setattr(table, "expire", expire)
        groups = Groups(table=table, expected=Expectation(model="m", block_size=4))
        await asyncio.sleep(10)
        await groups.close()
        return len(calls)

    assert simulate(main, seed=1) > 5
    assert "nobody foresaw this" in caplog.text


class Link:
    """A group that sends heartbeats for ever; ``write`` handles commands."""

    def __init__(self, write: Any) -> None:
        self._write = write

    async def Describe(self, request: pb.DescribeRequest, *, timeout: float) -> Any:
        return pb.GroupDescription(group_id="g", epoch=1, model="m", block_size=4)

    def Attach(self) -> "Link":
        return self

    async def write(self, command: pb.GroupCommand) -> None:
        await self._write(command)

    async def __aiter__(self) -> AsyncIterator[pb.StepFrame]:
        while True:
            yield pb.StepFrame()
            await asyncio.sleep(0.1)


def lost_with(link: Link, *, num_submits: int, config: GroupClientConfig) -> list[str]:
    """The errors with which streams over ``link`` are lost within a minute."""

    @contextlib.asynccontextmanager
    async def connect(address: str) -> AsyncIterator[Any]:
        yield link

    async def main(loop: SimLoop) -> list[str]:
        groups = Groups(
            table=RoutingTable(block_size=4, clock=loop.time),
            expected=Expectation(model="m", block_size=4),
            config=config,
            connect=connect,
        )
        groups.set_addresses(["host:1"])
        await groups.wait_for_change(timeout_s=5)
        streams = [
            groups.submit(GroupId("g"), pb.Submit(request_id=str(number), attempt=1))
            for number in range(num_submits)
        ]
        reasons = []
        for stream in streams:
            try:
                async with asyncio.timeout(60):
                    await stream.next()
            except GroupLost as error:
                reasons.append(str(error))
        await groups.close()
        return reasons

    return simulate(main, seed=1)


PATIENT = GroupClientConfig(step_deadline_s=1000, follow_events=False, max_unsent_commands=4)


def test_a_group_that_commands_cannot_be_written_to_is_lost() -> None:
    async def fail(command: pb.GroupCommand) -> None:
        if command.HasField("submit"):
            raise RuntimeError("nobody foresaw this")

    (reason,) = lost_with(Link(fail), num_submits=1, config=PATIENT)
    assert "nobody foresaw this" in reason


def test_a_group_that_reads_no_commands_is_lost_once_too_many_wait() -> None:
    async def block(command: pb.GroupCommand) -> None:
        await asyncio.Event().wait()

    reasons = lost_with(Link(block), num_submits=8, config=PATIENT)
    assert len(reasons) == 8
    assert "4 commands wait, and it does not read them" in reasons[0]


async def read_for(seconds: float, events: object, listener: Any) -> None:
    link: Any = SimpleNamespace(Events=events)
    client: Any = SimpleNamespace(address="host:1")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await read_events(link, client, listener)


@pytest.mark.parametrize("trouble", ["a digest that never agrees", "an error"])
def test_events_that_are_never_right_are_asked_for_ever_more_seldom(
    trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[float] = []

    async def main(loop: SimLoop) -> None:
        async def events(request: pb.EventsRequest) -> AsyncIterator[pb.EventBatch]:
            requests.append(loop.time())
            if trouble == "an error":
                raise OSError("nobody foresaw this")
            yield pb.EventBatch(epoch=1, digest=bytes(2048))

        listener: Any = SimpleNamespace(
            events=lambda client, batch: False, events_position=lambda client: Position()
        )
        await read_for(60, events, listener)

    simulate(main, seed=1)
    assert requests[1] == pytest.approx(0.1), "it may have been one event that was lost"
    assert len(requests) < 20
    assert len(caplog.records) == (trouble == "an error")


def test_events_that_are_lost_again_and_again_are_asked_for_twice_a_second() -> None:
    requests: list[int] = []

    async def main(loop: SimLoop) -> None:
        async def events(request: pb.EventsRequest) -> AsyncIterator[pb.EventBatch]:
            requests.append(request.next_seq)
            yield pb.EventBatch(epoch=1, digest=bytes(2048))

        listener: Any = SimpleNamespace(
            events=lambda client, batch: False,
            events_position=lambda client: Position(epoch=1, next_seq=len(requests)),
        )
        await read_for(60, events, listener)

    simulate(main, seed=1)
    assert 60 <= len(requests) <= 125


def test_events_that_were_right_since_are_asked_for_again_at_once() -> None:
    requests: list[float] = []

    async def main(loop: SimLoop) -> None:
        async def events(request: pb.EventsRequest) -> AsyncIterator[pb.EventBatch]:
            requests.append(loop.time())
            yield pb.EventBatch(epoch=1, digest=bytes(2048))

        listener: Any = SimpleNamespace(
            events=lambda client, batch: True, events_position=lambda client: Position()
        )
        await read_for(1.05, events, listener)

    simulate(main, seed=1)
    assert len(requests) == 11
