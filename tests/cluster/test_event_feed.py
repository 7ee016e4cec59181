"""Events that a subscriber receives, and when, on a virtual clock (gRPC: test_group_events.py)."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.sim.loop import SimLoop, simulate

from quire.cluster.group.engine_loop import EngineLoop, StepResult
from quire.cluster.group.event_feed import EventFeed
from quire.worker.blocks.events import BlockEvent, EventBatch, EventLog
from quire.worker.blocks.hashing import BlockHash

HEARTBEAT_S = 1.0
LENGTH_S = 20.0


class Steps:
    """The part of `EngineLoop` that feeds use, with an engine that stores a block in each step."""

    def __init__(self) -> None:
        self.log = EventLog(epoch=1)
        self._listeners: list[Callable[[StepResult], None]] = []

    def listen(self, on_step: Callable[[StepResult], None]) -> Callable[[], None]:
        self._listeners.append(on_step)
        return lambda: self._listeners.remove(on_step)

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(SimpleNamespace(events=self.log))

    def step(self) -> None:
        seq, events = self.log.next_seq, list[BlockEvent]()
        stop = self.log.subscribe(lambda _seq, event: events.append(event))
        self.log.stored([BlockHash(hashlib.sha256(bytes(f"{seq}", "ascii")).digest())])
        stop()
        batch = EventBatch(epoch=1, first_seq=seq, events=tuple(events))
        for on_step in self._listeners:
            on_step(cast(StepResult, SimpleNamespace(events=batch)))


async def hear(loop: SimLoop, *, step_s: float) -> list[tuple[float, EventBatch]]:
    """The events that a subscriber receives from a group with steps of this length, with times."""
    steps = Steps()

    async def work() -> None:
        while True:
            await asyncio.sleep(step_s)
            steps.step()

    async def read() -> list[tuple[float, EventBatch]]:
        heard = []
        feed = EventFeed(cast(EngineLoop, steps), heartbeat_s=HEARTBEAT_S)
        async for batch in feed.follow(epoch=1, next_seq=0):
            if loop.time() > LENGTH_S:
                break
            heard.append((loop.time(), batch))
        return heard

    worker = asyncio.create_task(work())
    heard = await read()
    worker.cancel()
    return heard


@pytest.mark.parametrize("step_s", [0.01, 0.3, 0.999, 7.0])
def test_a_digest_comes_in_each_heartbeat_however_busy_the_group_is(step_s: float) -> None:
    heard = simulate(lambda loop: hear(loop, step_s=step_s), seed=1)
    times = [at_s for at_s, batch in heard if batch.digest is not None]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert max(pauses) <= HEARTBEAT_S + 1e-6
    assert len(times) <= LENGTH_S / HEARTBEAT_S + 1, "each costs 2 KB"
    assert times[-1] >= LENGTH_S - HEARTBEAT_S - 1e-6


@pytest.mark.parametrize("step_s", [0.01, 0.3, 0.999, 7.0])
def test_nothing_is_told_twice_or_left_out_and_no_message_says_nothing(step_s: float) -> None:
    heard = simulate(lambda loop: hear(loop, step_s=step_s), seed=1)
    next_seq = 0
    for _, batch in heard:
        assert batch.first_seq == next_seq
        assert batch.events or batch.digest is not None
        next_seq += len(batch.events)
    assert next_seq >= LENGTH_S / step_s - 2
