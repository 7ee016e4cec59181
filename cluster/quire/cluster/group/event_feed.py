"""Feeds a group's block events to any number of subscribers, each at its own pace.

A subscriber's batches are contiguous: no event is missing or repeated. A subscriber that falls
behind by more than its buffer gets a snapshot instead.

Once per heartbeat a batch has a digest, with or without events. A subscriber thus detects any error
within a heartbeat: missing events by the batch's first number, and everything else by the digest.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from quire.cluster.group.engine_loop import EngineLoop, StepResult
from quire.worker.blocks.events import BlockEvent, EventBatch
from quire.worker.group_engine import GroupEngine


class EventFeed:
    """Follows an engine's event log."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        *,
        heartbeat_s: float = 1.0,
        buffer_events: int = 16_384,
    ) -> None:
        self._engine_loop = engine_loop
        self._heartbeat_s = heartbeat_s
        self._buffer_events = buffer_events

    async def follow(
        self, *, epoch: int, next_seq: int, buckets: bytes = b""
    ) -> AsyncGenerator[EventBatch, None]:
        """Yields all events from ``next_seq`` of ``epoch`` on, or a snapshot and all events after
        it.

        ``buckets`` are sent again in full. At most ``heartbeat_s`` pass between two batches with a
        digest, plus the time of an engine step and of the reader; such a batch may have no events.
        """
        loop = asyncio.get_running_loop()
        buffer = _Buffer(self._buffer_events)
        stop = self._engine_loop.listen(buffer.add)  # Before the replay, so that nothing is lost.
        try:
            batches = await self._engine_loop.call(
                lambda engine: _replay(engine, epoch=epoch, next_seq=next_seq, buckets=buckets)
            )
            heartbeat_at_s = loop.time() + self._heartbeat_s
            while True:
                for batch in batches:
                    yield batch
                    epoch, next_seq = batch.epoch, batch.first_seq + len(batch.events)
                await buffer.wait(heartbeat_at_s - loop.time())
                if buffer.overflowed:
                    buffer.clear()
                    batches = [
                        await self._engine_loop.call(lambda engine: engine.events.snapshot())
                    ]
                elif loop.time() >= heartbeat_at_s:
                    # Read in the engine's thread, so that digest and events are of one moment. The
                    # events are in the buffer too, now or soon, and are skipped there.
                    batches = [await self._engine_loop.call(_since(next_seq))]
                else:
                    events = buffer.take(next_seq)
                    batch = EventBatch(epoch=epoch, first_seq=next_seq, events=events)
                    batches = [batch] if events else []
                if batches and batches[0].digest is not None:
                    heartbeat_at_s = loop.time() + self._heartbeat_s
        finally:
            stop()


class _Buffer:
    """The events that one subscriber has not taken yet."""

    def __init__(self, capacity: int) -> None:
        self.overflowed = False
        self._capacity = capacity
        self._events: deque[BlockEvent] = deque()
        self._next_seq = 0  # The number after that of the newest event in the buffer.
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
        """Returns when there are events to take, or after ``timeout_s``."""
        if not self._changed.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def take(self, next_seq: int) -> tuple[BlockEvent, ...]:
        """Removes and returns the events from ``next_seq`` on; earlier ones were in the replay."""
        num_new = min(max(self._next_seq - next_seq, 0), len(self._events))
        events = tuple(self._events)[len(self._events) - num_new :]
        self.clear()
        return events

    def clear(self) -> None:
        self._events.clear()
        self.overflowed = False
        self._changed.clear()


def _since(seq: int) -> Callable[[GroupEngine], EventBatch]:
    return lambda engine: engine.events.since(seq)


def _replay(engine: GroupEngine, *, epoch: int, next_seq: int, buckets: bytes) -> list[EventBatch]:
    log = engine.events
    return log.replay(next_seq, buckets=buckets) if epoch == log.epoch else [log.snapshot()]
