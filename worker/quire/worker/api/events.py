"""Events from a block pool to the block directory: blocks stored and removed, in order.

A *log* numbers the events of one incarnation (*epoch*) of one group. A subscriber that missed
some asks for a replay; if the log no longer holds them it is given a snapshot instead.

The directory knows a block by its *key*, 64 bits of its hash, and keys fall into `NUM_BUCKETS`
*buckets*. The XOR of a bucket's keys is its *digest*: a subscriber compares it regularly with its
own, which reveals undetected errors, and requests the differing buckets again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NewType

import numpy as np

from quire.worker.api.hashing import BlockHash, BlockHashes

NUM_BUCKETS = 256
DIGEST_BYTES = 8 * NUM_BUCKETS

_BUCKET_BYTE = 7
"""Position in a hash of the highest byte of its key."""

_UNDIGESTED_AT_MOST = 4096
"""Blocks that the log has not yet taken into its digest."""

Digest = NewType("Digest", bytes)
"""The XOR of the held keys for each bucket: little-endian uint64s."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks can now be reused by a request with the same prefix."""

    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are gone: evicted, or dropped by a reset."""

    hashes: Sequence[BlockHash]


BlockEvent = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events ``first_seq``, ``first_seq + 1``, … of one epoch, or the whole state before them.

    With ``snapshot`` set, it is every hash that was stored after event ``first_seq - 1``, of
    ``buckets`` where that is set, and ``events`` is empty.
    """

    epoch: int
    first_seq: int
    events: tuple[BlockEvent, ...] = ()
    snapshot: BlockHashes | None = None
    buckets: bytes | None = None
    """A byte for each bucket that the snapshot covers; ``None`` is all."""
    digest: Digest | None = None
    """Digest of the blocks that are stored after the batch's events."""


def keys_of(hashes: bytes) -> list[int]:
    """The keys of the hashes in a `BlockHashes`'s data."""
    keys: list[int] = np.frombuffer(hashes, dtype="<u8")[::4].tolist()
    return keys


def bucket_of(key: int) -> int:
    """The bucket of a block's key: its highest 8 bits of 64."""
    return key >> 56


class EventLog:
    """The newest ``capacity`` events of one epoch, and the hashes that they add up to.

    Used from one thread, that of the engine; `subscribe` callbacks run in it.
    """

    def __init__(self, *, epoch: int, capacity: int = 65_536) -> None:
        self.epoch = epoch
        self._events: deque[BlockEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._stored: set[BlockHash] = set()
        self._digest = np.zeros(NUM_BUCKETS, dtype="<u8")
        self._undigested: list[BlockHash] = []
        self._subscribers: list[Callable[[int, BlockEvent], None]] = []

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        """Appends an event for the blocks that are not stored yet."""
        names = tuple(hashes)
        new = set(names)
        if len(new) < len(names) or not self._stored.isdisjoint(new):
            names = tuple(name for name in dict.fromkeys(names) if name not in self._stored)
        self._stored |= new
        self._append(BlocksStored(names))

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        """Appends an event for the blocks that are stored."""
        names = tuple(hashes)
        gone = set(names)
        if len(gone) < len(names) or not gone <= self._stored:
            names = tuple(name for name in dict.fromkeys(names) if name in self._stored)
        self._stored -= gone
        self._append(BlocksRemoved(names))

    def since(self, seq: int) -> EventBatch:
        """All events from number ``seq`` on, or a snapshot where some of those are gone.

        With the digest of what is stored now.
        """
        missing = self._next_seq - seq
        if not 0 <= missing <= len(self._events):
            return self.snapshot()
        tail = tuple(islice(reversed(self._events), missing))[::-1]
        return EventBatch(epoch=self.epoch, first_seq=seq, events=tail, digest=self._pack())

    def snapshot(self, buckets: bytes | None = None) -> EventBatch:
        """All that is stored now, or that of ``buckets``, a byte each; with the whole digest."""
        stored: Iterable[BlockHash] = self._stored
        if buckets is not None:
            chosen = frozenset(buckets)
            stored = (name for name in self._stored if name[_BUCKET_BYTE] in chosen)
        return EventBatch(
            epoch=self.epoch,
            first_seq=self._next_seq,
            snapshot=BlockHashes.of(stored),
            buckets=buckets,
            digest=self._pack(),
        )

    def replay(self, seq: int, *, buckets: bytes) -> list[EventBatch]:
        """The batches that bring a subscriber up to date that has applied the events before ``seq``
        but whose ``buckets`` are wrong."""
        events = self.since(seq)
        if events.snapshot is not None:
            return [events]
        # Behind the events comes a message without any: it shows at once if they did not come, and
        # its digest if they led to something else.
        last = self.snapshot(buckets) if buckets else self.since(self._next_seq)
        return [replace(events, digest=None), last] if events.events else [last]

    def subscribe(self, on_event: Callable[[int, BlockEvent], None]) -> Callable[[], None]:
        """Calls ``on_event(seq, event)`` for each later event; returns how to stop that."""
        self._subscribers.append(on_event)
        return lambda: self._subscribers.remove(on_event)

    def _append(self, event: BlockEvent) -> None:
        if not event.hashes:
            return
        self._undigested += event.hashes
        if len(self._undigested) > _UNDIGESTED_AT_MOST:
            self._digest_all()
        self._events.append(event)
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        for on_event in self._subscribers:
            on_event(seq, event)

    def _digest_all(self) -> None:
        """Many at once: one by one it would cost more than all else that the log does."""
        keys = np.frombuffer(b"".join([name[:8] for name in self._undigested]), dtype="<u8")
        np.bitwise_xor.at(self._digest, keys >> np.uint64(56), keys)
        self._undigested.clear()

    def _pack(self) -> Digest:
        self._digest_all()
        return Digest(self._digest.tobytes())
