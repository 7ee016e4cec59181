"""What a block pool tells the block directory: which prefixes came and went, in order.

A *log* numbers the events of one incarnation (*epoch*) of one group. A subscriber that missed
some asks for a replay; if the log no longer holds them it is given a snapshot instead.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.worker.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks can now be reused by a request with the same prefix."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are gone: evicted, or dropped by a reset."""

    hashes: tuple[BlockHash, ...]


BlockEvent = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events ``first_seq``, ``first_seq + 1``, … of one epoch, or the whole state before them.

    With ``snapshot`` set, it is every hash that was stored after event ``first_seq - 1`` and
    ``events`` is empty.
    """

    epoch: int
    first_seq: int
    events: tuple[BlockEvent, ...] = ()
    snapshot: frozenset[BlockHash] | None = None


class EventLog:
    """The newest ``capacity`` events of one epoch, and the hashes that they add up to.

    Used from one thread, that of the engine; `subscribe` callbacks run in it.
    """

    def __init__(self, *, epoch: int, capacity: int = 65_536) -> None:
        self.epoch = epoch
        self._events: deque[BlockEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._stored: set[BlockHash] = set()
        self._subscribers: list[Callable[[int, BlockEvent], None]] = []

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        event = BlocksStored(tuple(hashes))
        self._stored.update(event.hashes)
        self._append(event)

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        event = BlocksRemoved(tuple(hashes))
        self._stored.difference_update(event.hashes)
        self._append(event)

    def since(self, seq: int) -> EventBatch:
        """All events from number ``seq`` on, or a snapshot where some of those are gone."""
        missing = self._next_seq - seq
        if 0 <= missing <= len(self._events):
            tail = tuple(self._events)[len(self._events) - missing :]
            return EventBatch(epoch=self.epoch, first_seq=seq, events=tail)
        return self.snapshot()

    def snapshot(self) -> EventBatch:
        return EventBatch(
            epoch=self.epoch, first_seq=self._next_seq, snapshot=frozenset(self._stored)
        )

    def subscribe(self, on_event: Callable[[int, BlockEvent], None]) -> Callable[[], None]:
        """Calls ``on_event(seq, event)`` for each later event; returns how to stop that."""
        self._subscribers.append(on_event)
        return lambda: self._subscribers.remove(on_event)

    def _append(self, event: BlockEvent) -> None:
        if not event.hashes:
            return
        self._events.append(event)
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        for on_event in self._subscribers:
            on_event(seq, event)
