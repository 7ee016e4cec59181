"""The block directory: which replica group holds which cached blocks, as their events say.

What it says of a group is what that group's event log added up to at one point of one epoch, its
*position*: a batch that does not follow on changes nothing and is answered with the position to
resync from. So entries can be old, but they are never a mixture, and never of a former epoch.

An epoch not seen before is a newer incarnation. Batches reach a gateway over one stream per group,
so a late one belongs to an epoch that was seen before the present one, and those are remembered.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from quire.router.holders import HolderIndex
from quire.worker.events import BlocksStored, EventBatch
from quire.worker.hashing import BlockHash

GroupId = NewType("GroupId", str)
"""Names a replica group. The same name may come back with another epoch."""

_REMEMBERED_EPOCHS = 8


@dataclass(frozen=True, slots=True)
class Applied:
    """The batch is part of the directory now, or was already, or is of a former epoch."""

    num_events: int


@dataclass(frozen=True, slots=True)
class NeedsResync:
    """Events before the batch are missing and it was left out: ask for them from ``next_seq``."""

    epoch: int
    next_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStats:
    num_groups: int
    num_blocks: int
    """Blocks that at least one group holds."""
    num_holdings: int
    """Pairs of a group and a block that it holds."""
    num_events: int
    num_gaps: int
    num_late_batches: int
    """Batches of an epoch that had ended."""
    num_refused_blocks: int
    """Blocks left out because the directory was full."""


class _Group:
    """One group's position in its log, and the bit that stands for it in every mask."""

    __slots__ = ("bit", "epoch", "former_epochs", "last_heard_s", "next_seq", "num_blocks")

    def __init__(self, *, bit: int, epoch: int, now_s: float) -> None:
        self.bit = bit
        self.epoch = epoch
        self.former_epochs: deque[int] = deque(maxlen=_REMEMBERED_EPOCHS)
        self.next_seq = 0
        self.num_blocks = 0
        self.last_heard_s = now_s


class BlockDirectory:
    """Which group holds which blocks. Not safe for threads.

    At ``max_blocks`` a block that nobody holds yet is left out and counted: chains are then known
    up to where the room ended. A claim may so become too short but never false, and leaving out
    what comes last spares the roots, which the most requests share.
    """

    def __init__(self, *, max_blocks: int = 4_000_000, stale_after_s: float = 30.0) -> None:
        self._stale_after_s = stale_after_s
        self._groups: dict[GroupId, _Group] = {}
        self._index = HolderIndex(max_blocks=max_blocks)
        self._num_events = 0
        self._num_gaps = 0
        self._num_late_batches = 0

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[GroupId, int]:
        """How many of ``hashes`` each group holds from the first on, without a hole.

        Groups that lack the first block are left out.
        """
        lengths = self._index.longest_prefix(hashes)
        return {
            group_id: lengths[group.bit]
            for group_id, group in self._groups.items()
            if group.bit in lengths
        }

    def apply(self, group_id: GroupId, batch: EventBatch, *, now_s: float) -> Applied | NeedsResync:
        """Takes in what ``batch`` adds to what is known of the group.

        Events that were already applied are skipped, and so is a whole batch of a former epoch.
        A new epoch forgets all that the group held before. A snapshot replaces it, unless what is
        known is newer.
        """
        group = self._group_at(group_id, batch.epoch, now_s=now_s)
        if group is None:
            self._num_late_batches += 1
            return Applied(0)
        if batch.snapshot is not None:
            group.last_heard_s = now_s
            if batch.first_seq > group.next_seq:
                self._clear(group)
                group.num_blocks += self._index.add(list(batch.snapshot), bit=group.bit)
                group.next_seq = batch.first_seq
            return Applied(0)

        num_known = group.next_seq - batch.first_seq
        if num_known < 0:
            # Not heard, for what counts as news: a group that never gets to resync goes stale.
            self._num_gaps += 1
            return NeedsResync(group.epoch, group.next_seq)
        group.last_heard_s = now_s
        events = batch.events[num_known:]
        for event in events:
            if isinstance(event, BlocksStored):
                group.num_blocks += self._index.add(event.hashes, bit=group.bit)
            else:
                group.num_blocks -= self._index.remove(event.hashes, bit=group.bit)
        group.next_seq += len(events)
        self._num_events += len(events)
        return Applied(len(events))

    def position(self, group_id: GroupId) -> tuple[int, int]:
        """The epoch and the number of the next event to ask the group for; zeros if unknown."""
        group = self._groups.get(group_id)
        return (group.epoch, group.next_seq) if group else (0, 0)

    def num_blocks(self, group_id: GroupId) -> int:
        """How many blocks the group is known to hold."""
        group = self._groups.get(group_id)
        return group.num_blocks if group else 0

    def drop(self, group_id: GroupId) -> None:
        """Forgets the group altogether. Its stream must have been closed."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._clear(group)

    def expire(self, *, now_s: float) -> list[GroupId]:
        """Forgets the blocks of groups that were silent for too long, and returns those groups.

        What such a group sends next is answered with a resync from its first event.
        """
        silent = [
            group_id
            for group_id, group in self._groups.items()
            if now_s - group.last_heard_s > self._stale_after_s
            and (group.num_blocks or group.next_seq)
        ]
        for group_id in silent:
            group = self._groups[group_id]
            self._clear(group)
            group.next_seq = 0
        return silent

    def stats(self) -> DirectoryStats:
        return DirectoryStats(
            num_groups=len(self._groups),
            num_blocks=self._index.num_blocks,
            num_holdings=sum(group.num_blocks for group in self._groups.values()),
            num_events=self._num_events,
            num_gaps=self._num_gaps,
            num_late_batches=self._num_late_batches,
            num_refused_blocks=self._index.num_refused_blocks,
        )

    def _group_at(self, group_id: GroupId, epoch: int, *, now_s: float) -> _Group | None:
        """The group in ``epoch``, begun anew where that is a new one; None for a former epoch."""
        group = self._groups.get(group_id)
        if group is None:
            used = 0
            for other in self._groups.values():
                used |= other.bit
            group = _Group(bit=~used & (used + 1), epoch=epoch, now_s=now_s)
            self._groups[group_id] = group
        elif epoch in group.former_epochs:
            return None
        elif epoch != group.epoch:
            self._clear(group)
            group.former_epochs.append(group.epoch)
            group.epoch, group.next_seq = epoch, 0
        return group

    def _clear(self, group: _Group) -> None:
        if group.num_blocks:
            self._index.clear(bit=group.bit)
            group.num_blocks = 0
