"""Events from a block pool to the block directory: blocks stored and removed, in order.

A *log* numbers the events of one incarnation (*epoch*) of one group. A subscriber that missed
events requests a replay; if the log no longer holds them, the subscriber gets a snapshot instead.

A block may be in several *tiers*. Tier 0 is the KV cache, and each tier is slower than the one
before it. The log receives the blocks of every tier; its events name each block's fastest tier.

A log that keeps *contents* also stores which tokens a block holds, as long as a tier has the block.

The directory identifies a block by its *key*, 64 bits of its hash, and keys fall into `NUM_BUCKETS`
*buckets*. The XOR of a bucket's keys is its *digest*. A subscriber regularly compares it with its
own digest, which reveals undetected errors, and requests the differing buckets again. Each tier has
its own digests, which cover the blocks that are in it or in a faster tier.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, NewType

import numpy as np

from quire.worker.blocks.hashing import BlockHash, BlockHashes

NUM_BUCKETS = 256
DIGEST_BYTES = 8 * NUM_BUCKETS
"""Size of one tier's digest."""
MAX_TIERS = 3
"""KV cache, host memory and disk."""

_BUCKET_BYTE = 7
"""Position in a hash of the highest byte of its key."""

_UNDIGESTED_AT_MOST = 4096
"""Most blocks that the log has not added to its digest yet."""

Digest = NewType("Digest", bytes)
"""For each tier, one little-endian uint64 for each bucket: the XOR of the keys of the blocks that
are in this tier or in a faster one."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks can now be reused by a request with the same prefix."""

    hashes: Sequence[BlockHash]
    tier: int = 0
    """The blocks' fastest tier now. Before this event they were in any other tier, or in none."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are in no tier any more: they were evicted, or dropped by a reset."""

    hashes: Sequence[BlockHash]


BlockEvent = BlocksStored | BlocksRemoved


class BlockContent(NamedTuple):
    """A block's tokens, and the other fields that its hash covers."""

    parent: BlockHash | None
    """The block before it; ``None`` for the first block of a chain."""
    token_ids: bytes
    """Little-endian uint32s."""
    adapter: str
    cache_salt: str
    """The cache salt, prefixed with the tenant's name."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events ``first_seq``, ``first_seq + 1``, … of one epoch, or a snapshot of the state.

    If ``snapshot`` is set, it has every hash that was in the KV cache after event
    ``first_seq - 1``, restricted to ``buckets`` if those are set, and ``events`` is empty.
    """

    epoch: int
    first_seq: int
    events: tuple[BlockEvent, ...] = ()
    snapshot: BlockHashes | None = None
    slower: tuple[BlockHashes, ...] = ()
    """In a snapshot: for each slower tier, the hashes of the blocks whose fastest tier it is."""
    buckets: bytes | None = None
    """One byte for each bucket that the snapshot covers; ``None``: all buckets."""
    digest: Digest | None = None
    """Digest of the blocks that are stored after this batch's events."""


def keys_of(hashes: bytes) -> list[int]:
    """The keys of the hashes in a `BlockHashes`'s data."""
    keys: list[int] = np.frombuffer(hashes, dtype="<u8")[::4].tolist()
    return keys


def bucket_of(key: int) -> int:
    """The bucket of a block's key: its highest 8 bits of 64."""
    return key >> 56


class EventLog:
    """The newest ``capacity`` events of one epoch, and the hashes that are stored now.

    Used only from the engine's thread, which also runs the `subscribe` callbacks.
    """

    def __init__(
        self,
        *,
        epoch: int,
        num_tiers: int = 1,
        capacity: int = 65_536,
        keeps_contents: bool = False,
    ) -> None:
        """Raises ValueError where ``num_tiers`` is not 1 to `MAX_TIERS`."""
        if not 1 <= num_tiers <= MAX_TIERS:
            raise ValueError(f"num_tiers={num_tiers}: must be 1 to {MAX_TIERS}")
        self.epoch = epoch
        self.contents: dict[BlockHash, BlockContent] | None = {} if keeps_contents else None
        """Contents of stored blocks that `describe` has received; ``None`` if the log keeps none.
        Other threads may look blocks up."""
        self._events: deque[BlockEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._tiers: list[set[BlockHash]] = [set() for _ in range(num_tiers)]
        # For each tier: the digest of the blocks whose fastest tier it is, and later changes.
        self._digests = np.zeros((num_tiers, NUM_BUCKETS), dtype="<u8")
        self._undigested: list[list[BlockHash]] = [[] for _ in range(num_tiers)]
        self._subscribers: list[Callable[[int, BlockEvent], None]] = []

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def stored(self, hashes: Iterable[BlockHash], tier: int = 0) -> None:
        """Adds blocks to ``tier``. Appends an event for those that were in no tier as fast."""
        names = tuple(hashes)
        new, held = set(names), self._tiers[tier]
        if len(new) < len(names) or not held.isdisjoint(new):
            names = tuple(name for name in dict.fromkeys(names) if name not in held)
        held |= new
        if len(self._tiers) > 1:
            names = self._not_faster(names, tier)
            left: Sequence[BlockHash] = names
            for slower in range(tier + 1, len(self._tiers)):
                there, left = _split(left, self._tiers[slower])
                self._undigested[slower] += there
        self._undigested[tier] += names
        self._append(BlocksStored(names, tier))

    def describe(self, contents: Mapping[BlockHash, BlockContent]) -> None:
        """Keeps the contents of blocks that are stored, or will be by the next call. Appends
        another event for blocks that were stored before they were described.

        The log must keep contents.
        """
        assert self.contents is not None
        left: Sequence[BlockHash] = [name for name in contents if name not in self.contents]
        self.contents.update((name, contents[name]) for name in left)
        for tier, held in enumerate(self._tiers):
            there, left = _split(left, held)
            self._append(BlocksStored(there, tier))

    def removed(self, hashes: Iterable[BlockHash], tier: int = 0) -> None:
        """Removes blocks from ``tier``. Appends events for those whose fastest tier it was."""
        names = tuple(hashes)
        gone, held = set(names), self._tiers[tier]
        if len(gone) < len(names) or not gone <= held:
            names = tuple(name for name in dict.fromkeys(names) if name in held)
        held -= gone
        if len(self._tiers) > 1:
            names = self._not_faster(names, tier)
        self._undigested[tier] += names
        for slower in range(tier + 1, len(self._tiers)):
            there, names = _split(names, self._tiers[slower])
            self._undigested[slower] += there
            self._append(BlocksStored(there, slower))
        if self.contents:
            for name in names:
                self.contents.pop(name, None)
        self._append(BlocksRemoved(names))

    def since(self, seq: int) -> EventBatch:
        """All events from number ``seq`` on, or a snapshot if the log no longer holds all of them.

        Includes the current digest.
        """
        missing = self._next_seq - seq
        if not 0 <= missing <= len(self._events):
            return self.snapshot()
        tail = tuple(islice(reversed(self._events), missing))[::-1]
        return EventBatch(epoch=self.epoch, first_seq=seq, events=tail, digest=self._pack())

    def snapshot(self, buckets: bytes | None = None) -> EventBatch:
        """All stored blocks, or those in ``buckets`` (one byte each), with the whole digest."""
        chosen = None if buckets is None else frozenset(buckets)
        snapshot, *slower = [self._fastest_in(tier, chosen) for tier in range(len(self._tiers))]
        return EventBatch(
            epoch=self.epoch,
            first_seq=self._next_seq,
            snapshot=snapshot,
            slower=tuple(slower),
            buckets=buckets,
            digest=self._pack(),
        )

    def replay(self, seq: int, *, buckets: bytes) -> list[EventBatch]:
        """The batches that update a subscriber that has applied the events before ``seq`` and whose
        ``buckets`` are wrong."""
        events = self.since(seq)
        if events.snapshot is not None:
            return [events]
        # A batch without events follows the events: its number shows at once whether they were
        # lost, and its digest whether applying them led to a different state.
        last = self.snapshot(buckets) if buckets else self.since(self._next_seq)
        return [replace(events, digest=None), last] if events.events else [last]

    def subscribe(self, on_event: Callable[[int, BlockEvent], None]) -> Callable[[], None]:
        """Calls ``on_event(seq, event)`` for each later event. Returns a function that stops it."""
        self._subscribers.append(on_event)
        return lambda: self._subscribers.remove(on_event)

    def _not_faster(self, names: tuple[BlockHash, ...], tier: int) -> tuple[BlockHash, ...]:
        """The ``names`` that are in no tier faster than ``tier``."""
        for faster in self._tiers[:tier]:
            if not faster.isdisjoint(names):
                names = tuple(name for name in names if name not in faster)
        return names

    def _fastest_in(self, tier: int, buckets: frozenset[int] | None) -> BlockHashes:
        """The blocks whose fastest tier is ``tier``, restricted to ``buckets`` if those are set."""
        names: Iterable[BlockHash] = self._tiers[tier]
        if tier:
            names = self._tiers[tier].difference(*self._tiers[:tier])
        if buckets is not None:
            names = (name for name in names if name[_BUCKET_BYTE] in buckets)
        return BlockHashes.of(names)

    def _append(self, event: BlockEvent) -> None:
        if not event.hashes:
            return
        if sum(map(len, self._undigested)) > _UNDIGESTED_AT_MOST:
            self._digest_all()
        self._events.append(event)
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        for on_event in self._subscribers:
            on_event(seq, event)

    def _digest_all(self) -> None:
        """Adds pending blocks to the digests. One at a time would cost more than the rest of the
        log's work."""
        for digest, names in zip(self._digests, self._undigested, strict=True):
            keys = np.frombuffer(b"".join([name[:8] for name in names]), dtype="<u8")
            np.bitwise_xor.at(digest, keys >> np.uint64(56), keys)
            names.clear()

    def _pack(self) -> Digest:
        self._digest_all()
        return Digest(np.bitwise_xor.accumulate(self._digests, axis=0).tobytes())


def _split(
    names: Sequence[BlockHash], held: set[BlockHash]
) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
    """Splits ``names`` into those in ``held`` and the others."""
    if held.isdisjoint(names):
        return (), tuple(names)
    there = tuple(name for name in names if name in held)
    return there, tuple(name for name in names if name not in held)
