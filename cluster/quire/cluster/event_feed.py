"""Block events for any number of subscribers, each at its own pace.

A subscriber's batches follow on from each other: no event is left out or told twice. One that
falls further behind than its buffer allows is given a snapshot instead of what it missed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from quire.cluster.engine_loop import EngineLoop, StepResult
from quire.worker.engine import Engine
from quire.worker.events import BlockEvent, EventBatch


class EventFeed:
    """Follows an engine's event log."""

    def __init__(
        self, engine_loop: EngineLoop, *, heartbeat_s: float = 1.0, buffer_events: int = 16_384
    ) -> None:
        self._engine_loop = engine_loop
        self._heartbeat_s = heartbeat_s
        self._buffer_events = buffer_events

    async def follow(self, *, epoch: int, next_seq: int) -> AsyncGenerator[EventBatch, None]:
        """All events from ``next_seq`` of ``epoch`` on, or a snapshot and all behind it.

        An empty batch says that nothing happened for ``heartbeat_s``.
        """
        buffer = _Buffer(self._buffer_events)
        stop = self._engine_loop.listen(buffer.add)  # Before the replay, so that nothing is lost.
        try:
            batch = await self._engine_loop.call(
                lambda engine: _replay(engine, epoch=epoch, next_seq=next_seq)
            )
            while True:
                yield batch
                next_seq = batch.first_seq + len(batch.events)
                await buffer.wait(self._heartbeat_s)
                if buffer.overflowed:
                    buffer.clear()
                    batch = await self._engine_loop.call(lambda engine: engine.events.snapshot())
                else:
                    events = buffer.take(next_seq)
                    batch = EventBatch(epoch=batch.epoch, first_seq=next_seq, events=events)
        finally:
            stop()


class _Buffer:
    """Events that one subscriber has not taken yet."""

    def __init__(self, capacity: int) -> None:
        self.overflowed = False
        self._capacity = capacity
        self._events: deque[BlockEvent] = deque()
        self._next_seq = 0  # Behind the newest event in the buffer.
        self._changed = asyncio.Event()

    def add(self, result: StepResult) -> None:
        batch = result.events
        self._next_seq = batch.first_seq + len(batch.events)
        if not batch.events or self.overflowed:
            return
        self._events.extend(batch.events)
        self._changed.set()
        if len(self._events) > self._capacity:
            self.overflowed = True
            self._events.clear()

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is something to take, or after ``timeout_s``."""
        if not self._changed.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def take(self, next_seq: int) -> tuple[BlockEvent, ...]:
        """The events from ``next_seq`` on; earlier ones came with the replay already."""
        num_new = min(max(self._next_seq - next_seq, 0), len(self._events))
        events = tuple(self._events)[len(self._events) - num_new :]
        self.clear()
        return events

    def clear(self) -> None:
        self._events.clear()
        self.overflowed = False
        self._changed.clear()


def _replay(engine: Engine, *, epoch: int, next_seq: int) -> EventBatch:
    log = engine.events
    return log.since(next_seq) if epoch == log.epoch else log.snapshot()
