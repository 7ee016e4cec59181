"""The block directory: which replica group holds which KV blocks, according to its block events.

A group's entries equal the state of that group's event log at one point of one epoch, its
*position*. A batch that leaves a gap changes nothing, and the answer is the position to resync
from. So entries can be old, but they never mix two points in time or two epochs.

If that fails for an unforeseen reason, the digests that are sent with the events reveal it. The
buckets whose digest differs have *drifted* and are requested again. Until then they are used as
they are, because a wrong entry only costs recomputation.

A group with several tiers (GPU, host memory, disk) has a slot in the index for each: slot t has the
blocks in tier t or a faster one. A block that moves to a slower tier stays in that tier's slot, so
the chains of each slot have no holes. A new group has one tier, until a batch shows more.

A new epoch means that the group restarted. Batches reach a gateway over one stream per group, so a
late batch belongs to an epoch that was seen before the current one. Those epochs are remembered.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, NewType

import numpy as np

from quire.router.prefix_index.index import Lengths, PrefixIndex, Slot, new_index
from quire.worker.blocks.events import (
    DIGEST_BYTES,
    NUM_BUCKETS,
    BlocksStored,
    Digest,
    EventBatch,
)
from quire.worker.blocks.hashing import BlockHash, BlockHashes

GroupId = NewType("GroupId", str)
"""Names a replica group. The same name may be used again, with another epoch."""

_REMEMBERED_EPOCHS = 8

_ROOM_TO_HEAL = 0.9
"""Below this fill level, refused blocks are requested again."""


class Position(NamedTuple):
    """The event from which to subscribe to a group; the default is its first event."""

    epoch: int = 0
    next_seq: int = 0
    drifted: bytes = b""
    """Buckets to request again, a byte each."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The batch was applied, or had been before, or was ignored as one of a former epoch."""

    num_events: int


@dataclass(frozen=True, slots=True)
class NeedsResync:
    """The caller must resync from this position.

    Either events before the batch are missing and the batch was not applied, or some buckets have
    drifted.
    """

    epoch: int
    next_seq: int
    drifted: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStats:
    num_groups: int
    num_blocks: int
    """Blocks that at least one group holds."""
    num_holdings: int
    """Pairs of a group and a block that it holds."""
    num_events: int
    num_gaps: int
    num_resyncs: int
    """Snapshots applied, of all buckets or of some."""
    num_late_batches: int
    """Batches ignored because they were of a former epoch."""
    num_drifted_buckets: int
    """Buckets found to differ from the blocks that their group holds."""
    num_refused_blocks: int
    """Blocks left out because the directory was full, counted once per tier."""
    num_sets: int
    """Distinct sets of holders."""
    num_bytes: int
    max_blocks: int
    num_stale_groups: int
    """Groups without events for too long, as of the last `BlockDirectory.expire`."""


class _Group:
    """One group's position in its event log, and the index's slots of its tiers."""

    __slots__ = (
        "drifted",
        "epoch",
        "former_epochs",
        "is_stale",
        "last_heard_s",
        "next_seq",
        "slots",
    )

    def __init__(self, *, slots: tuple[Slot, ...], epoch: int, now_s: float) -> None:
        self.slots = slots
        self.epoch = epoch
        self.former_epochs: deque[int] = deque(maxlen=_REMEMBERED_EPOCHS)
        self.next_seq = 0
        self.drifted = b""
        self.last_heard_s = now_s
        self.is_stale = False

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.next_seq, self.drifted)


class BlockDirectory:
    """Which group holds which blocks. Not thread-safe.

    At ``max_blocks`` a block that no group holds yet is refused: left out, counted, and requested
    again once there is room. So a prefix may be reported too short but never too long. The refused
    blocks are the latest ones, not the roots, which most requests share.
    """

    def __init__(
        self,
        *,
        max_blocks: int = 4_000_000,
        stale_after_s: float = 30.0,
        index: PrefixIndex | None = None,
    ) -> None:
        """``index`` is for tests; it must be empty and have room for ``max_blocks``."""
        self._max_blocks = max_blocks
        self._stale_after_s = stale_after_s
        self._groups: dict[GroupId, _Group] = {}
        # The group of each slot; a free slot keeps its last. None for the slot of a slower tier.
        self._names: list[GroupId | None] = []
        self._free_slots: list[Slot] = []  # A heap: the smallest slot is taken first.
        self._index = new_index(max_blocks=max_blocks) if index is None else index
        self._num_events = 0
        self._num_gaps = 0
        self._num_resyncs = 0
        self._num_late_batches = 0
        self._num_drifted_buckets = 0

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[GroupId, int]:
        """How many leading blocks of the chain ``hashes`` each group has in its KV cache.

        Groups without the first block are left out. The cost is a few look-ups per distinct prefix
        length, not one per hash: see `quire.router.prefix_index.index`.
        """
        found = self._index.longest_prefix(BlockHashes.of(hashes).data, self._names)
        found.pop(None, None)
        return found  # type: ignore[return-value]

    def prefix_lengths(self, hashes: Sequence[BlockHash]) -> Lengths:
        """How many leading blocks of the chain each slot has: one slot per tier, see `slots`.

        As an array it costs no more for hundreds of groups. It belongs to the directory and is
        valid until the next look-up.
        """
        return self._index.prefix_lengths(BlockHashes.of(hashes).data)

    def slots(self, group_id: GroupId) -> tuple[Slot, ...]:
        """The index of each of the group's tiers in `prefix_lengths`; empty for an unknown group.
        Valid until the group is dropped or a batch with a new epoch or more tiers is applied."""
        group = self._groups.get(group_id)
        return group.slots if group else ()

    def apply(self, group_id: GroupId, batch: EventBatch, *, now_s: float) -> Applied | NeedsResync:
        """Applies the events or the snapshot of ``batch`` to the group's entries.

        Events that were already applied are skipped, and so is a whole batch of a former epoch.
        A new epoch drops all entries of the group. A snapshot replaces the entries that it covers,
        unless those are newer.
        """
        group = self._group_at(group_id, batch.epoch, now_s=now_s)
        if group is None:
            self._num_late_batches += 1
            return Applied(0)
        self._grow(group, _num_tiers(batch))
        num_known = group.next_seq - batch.first_seq
        if num_known < 0 and (batch.snapshot is None or batch.buckets is not None):
            # `last_heard_s` stays: a group that never manages to resync goes stale.
            self._num_gaps += 1
            return NeedsResync(*group.position)
        group.last_heard_s = now_s
        num_events = 0
        if batch.snapshot is None:
            num_events = self._apply_events(group, batch, num_known)
        elif batch.buckets is None and num_known < 0:
            self._clear(group)
            for slot, data in zip(group.slots, _by_tier(batch, len(group.slots)), strict=True):
                self._index.add(data, slot=slot)
            group.next_seq = batch.first_seq
            self._num_resyncs += 1
        elif batch.buckets is not None and num_known == 0:
            for slot, data in zip(group.slots, _by_tier(batch, len(group.slots)), strict=True):
                self._index.replace(data, slot=slot, buckets=batch.buckets)
            group.drifted = bytes(sorted(set(group.drifted) - set(batch.buckets)))
            self._num_resyncs += 1
        if batch.digest is not None and group.next_seq == batch.first_seq + len(batch.events):
            self._compare(group, batch.digest)
            if group.drifted:
                return NeedsResync(*group.position)
        return Applied(num_events)

    def position(self, group_id: GroupId) -> Position:
        """The event from which to subscribe to the group."""
        group = self._groups.get(group_id)
        return group.position if group else Position()

    def num_blocks(self, group_id: GroupId) -> int:
        """How many blocks the group holds, in any tier."""
        group = self._groups.get(group_id)
        return self._num_held(group) if group else 0

    def drop(self, group_id: GroupId) -> None:
        """Removes the group. Its event stream must have been closed."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._clear(group)
            for slot in group.slots:
                heappush(self._free_slots, slot)

    def expire(self, *, now_s: float) -> list[GroupId]:
        """Drops the blocks of groups that sent nothing for too long, and returns those groups.

        The next batch of such a group is answered with a resync from its first event.
        """
        silent = []
        for group_id, group in self._groups.items():
            group.is_stale = now_s - group.last_heard_s > self._stale_after_s
            if group.is_stale and not self._is_new(group):
                self._clear(group)
                silent.append(group_id)
        return silent

    def stats(self) -> DirectoryStats:
        return DirectoryStats(
            num_groups=len(self._groups),
            num_blocks=self._index.num_blocks,
            num_holdings=sum(map(self._num_held, self._groups.values())),
            num_events=self._num_events,
            num_gaps=self._num_gaps,
            num_resyncs=self._num_resyncs,
            num_late_batches=self._num_late_batches,
            num_drifted_buckets=self._num_drifted_buckets,
            num_refused_blocks=self._index.num_refused_blocks,
            num_sets=self._index.num_sets,
            num_bytes=self._index.num_bytes,
            max_blocks=self._max_blocks,
            num_stale_groups=sum(group.is_stale for group in self._groups.values()),
        )

    def _apply_events(self, group: _Group, batch: EventBatch, num_known: int) -> int:
        events = batch.events[num_known:]
        for event in events:
            data = BlockHashes.of(event.hashes).data
            first = event.tier if isinstance(event, BlocksStored) else len(group.slots)
            for slot in group.slots[:first]:
                self._index.remove(data, slot=slot)
            for slot in group.slots[first:]:
                self._index.add(data, slot=slot)
        group.next_seq += len(events)
        self._num_events += len(events)
        return len(events)

    def _compare(self, group: _Group, digest: Digest) -> None:
        """Sets the drifted buckets: those whose digest differs from the group's own."""
        found = [self._index.digests(slot) for slot in group.slots]
        if b"".join(ours for ours, _ in found) == digest:
            group.drifted = b""
            return
        is_drifted = np.zeros(NUM_BUCKETS, dtype=bool)
        is_full = self._index.num_blocks > _ROOM_TO_HEAL * self._max_blocks
        theirs = np.frombuffer(digest, dtype="<u8").reshape(-1, NUM_BUCKETS)
        for (ours, refused), their in zip(found, theirs, strict=False):
            differs = np.frombuffer(ours, dtype="<u8") != their
            if is_full:
                differs &= np.frombuffer(refused, dtype=np.uint8) == 0
            is_drifted |= differs
        group.drifted = is_drifted.nonzero()[0].astype(np.uint8).tobytes()
        self._num_drifted_buckets += len(group.drifted)

    def _grow(self, group: _Group, num_tiers: int) -> None:
        """Adds slots for new tiers. The group's entries are dropped, to be resynced."""
        if num_tiers <= len(group.slots):
            return
        if not self._is_new(group):
            self._clear(group)
        while len(group.slots) < num_tiers:
            group.slots += (self._take_slot(None),)

    def _is_new(self, group: _Group) -> bool:
        """Whether nothing of the group's current epoch was applied yet."""
        return not group.next_seq and not any(map(self._index.num_held, group.slots))

    def _num_held(self, group: _Group) -> int:
        return self._index.num_held(group.slots[-1])

    def _group_at(self, group_id: GroupId, epoch: int, *, now_s: float) -> _Group | None:
        """The group in ``epoch``, created empty for a new epoch; None for a former epoch."""
        group = self._groups.get(group_id)
        if group is None:
            group = _Group(slots=(self._take_slot(group_id),), epoch=epoch, now_s=now_s)
            self._groups[group_id] = group
        elif epoch in group.former_epochs:
            return None
        elif epoch != group.epoch:
            self._clear(group)
            for slot in group.slots[1:]:
                heappush(self._free_slots, slot)
            group.slots = group.slots[:1]
            group.former_epochs.append(group.epoch)
            group.epoch = epoch
        return group

    def _take_slot(self, group_id: GroupId | None) -> Slot:
        slot = heappop(self._free_slots) if self._free_slots else len(self._names)
        self._index.admit(slot)
        self._names[slot : slot + 1] = [group_id]
        return slot

    def _clear(self, group: _Group) -> None:
        """Drops the group's entries and returns to the first event of its epoch."""
        for slot in group.slots:
            self._index.clear(slot=slot)
        group.next_seq = 0
        group.drifted = b""


def _num_tiers(batch: EventBatch) -> int:
    """The number of tiers that the group has at least, as far as the batch shows."""
    num_tiers = 1 + len(batch.slower)
    if batch.digest is not None:
        num_tiers = max(num_tiers, len(batch.digest) // DIGEST_BYTES)
    for event in batch.events:
        if isinstance(event, BlocksStored) and event.tier >= num_tiers:
            num_tiers = event.tier + 1
    return num_tiers


def _by_tier(batch: EventBatch, num_tiers: int) -> Iterator[bytes]:
    """A snapshot's hashes for each tier's slot: blocks in that tier or a faster one."""
    assert batch.snapshot is not None
    data = batch.snapshot.data
    for tier in range(num_tiers):
        if 0 < tier <= len(batch.slower):
            data += batch.slower[tier - 1].data
        yield data
