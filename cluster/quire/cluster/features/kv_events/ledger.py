"""Tracks a group's cached blocks by its block events, and derives the changes for a subscriber.

    known     the group has the block, in the noted tier
    told      the subscriber knows the block: its parents are told, and its contents have arrived

A block is told once, with its contents, in its fastest tier. One that moves is told as gone from
the old tier, and then told in the new one. A snapshot, sent instead of missed events or because a
digest differs, yields only the differences.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quire.cluster.wire import Described
from quire.router.prefix_index.directory import Position
from quire.worker.blocks.events import (
    DIGEST_BYTES,
    MAX_TIERS,
    NUM_BUCKETS,
    BlockContent,
    BlocksStored,
    Digest,
    EventBatch,
    bucket_of,
)
from quire.worker.blocks.hashing import BlockHash

MAX_BLOCKS = 512
"""Most blocks per change. A ledger yields after each change, so that other work can run."""


class Block(NamedTuple):
    key: int
    """64 bits of the block's hash, as a signed number."""
    content: BlockContent


class Told(NamedTuple):
    """Blocks that are new in a tier, parents before children."""

    tier: int
    blocks: Sequence[Block]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


class Gone(NamedTuple):
    """Blocks that are no longer in a tier, by key."""

    tier: int
    keys: Sequence[int]

    @property
    def num_blocks(self) -> int:
        return len(self.keys)


Change = Told | Gone


class Gap(Exception):
    """Events before a batch are missing, or the ledger differs from the group's digest. Read again
    from the ledger's position."""


class Keys:
    """The keys by which a subscriber that knows no hashes identifies the blocks of all groups."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[BlockHash, int]] = {}  # Block and its number of groups.

    def take(self, name: BlockHash) -> int | None:
        """The block's key, taken for one more group; ``None`` if another block has that key."""
        key = key_of(name)
        holder, num_groups = self._names.get(key, (name, 0))
        if holder != name:
            return None
        self._names[key] = name, num_groups + 1
        return key

    def give_back(self, key: int) -> None:
        name, num_groups = self._names[key]
        if num_groups == 1:
            del self._names[key]
        else:
            self._names[key] = name, num_groups - 1


def key_of(name: BlockHash) -> int:
    return int.from_bytes(name[:8], "little", signed=True)


class Ledger:
    """The blocks of one group. Changes must be told in the order in which they are returned."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._tiers: dict[BlockHash, int] = {}
        self._told: dict[BlockHash, int] = {}
        """Keys of told blocks, parents before children."""
        self._digests = [[0] * NUM_BUCKETS for _ in range(MAX_TIERS)]
        """For each tier, the digest of the blocks whose fastest tier it is."""
        self._position = Position()
        self._num_more = 0
        """Number of messages with contents that have not arrived yet."""

    @property
    def position(self) -> Position:
        """The position from which to request events: the beginning if contents are missing."""
        return Position() if self._num_more else self._position

    def apply(
        self, batch: EventBatch, contents: Sequence[Described], *, num_more: int
    ) -> Iterator[Sequence[Change]]:
        """Applies a message of the group; ``num_more`` messages with contents follow it. Yields the
        changes. Run the iterator to its end; other work may run between two steps.

        Raises:
            Gap: The batch does not follow the last one, or the digest differs after it.
        """
        is_next = (batch.epoch, batch.first_seq) == self._position[:2]
        if batch.snapshot is None and not is_next:
            raise Gap(f"event {batch.first_seq} came, and not {self._position.next_seq}")
        self._num_more = num_more + 1
        if batch.snapshot is not None:
            yield from self._replace(batch)
        for event in batch.events:
            tier = event.tier if isinstance(event, BlocksStored) else None
            for names in _pieces(event.hashes):
                yield self._move(names, tier)
        self._position = Position(batch.epoch, batch.first_seq + len(batch.events))
        yield self._tell(contents)
        if batch.digest is not None and not self._agrees(batch.digest):
            self._position = Position()
            raise Gap("the digest of the blocks is another one")
        self._num_more = num_more

    def clear(self) -> Iterator[Sequence[Change]]:
        """Removes all blocks, when the group is gone. Yields the changes."""
        for names in _pieces(list(self._tiers)[::-1]):
            yield self._move(names, None)

    def _replace(self, batch: EventBatch) -> Iterator[Sequence[Change]]:
        there: dict[BlockHash, int] = {}
        for tier, stored in enumerate((batch.snapshot or (), *batch.slower)):
            there.update(dict.fromkeys(stored, tier))
            yield ()
        for names in _pieces(list(self._tiers)[::-1]):
            yield self._move([name for name in names if name not in there], None)
        for tier, stored in enumerate((batch.snapshot or (), *batch.slower)):
            for names in _pieces(stored):
                yield self._move(names, tier)

    def _move(self, names: Iterable[BlockHash], tier: int | None) -> Sequence[Change]:
        """Notes that the blocks are in ``tier`` now, or gone if it is ``None``."""
        gone: dict[int, list[int]] = {}
        for name in names:
            before = self._tiers.get(name)
            if before == tier:
                continue
            key = int.from_bytes(name[:8], "little")
            if before is not None:
                self._digests[before][bucket_of(key)] ^= key
                told = self._told.pop(name, None)
                if told is not None:
                    self._keys.give_back(told)
                    gone.setdefault(before, []).append(told)
            if tier is None:
                del self._tiers[name]
            else:
                self._tiers[name] = tier
                self._digests[tier][bucket_of(key)] ^= key
        return [Gone(tier, keys) for tier, keys in gone.items()]

    def _tell(self, contents: Sequence[Described]) -> Sequence[Change]:
        told: dict[int, list[Block]] = {}
        for name, content in contents:
            tier, parent = self._tiers.get(name), content.parent
            if tier is None or name in self._told:
                continue
            if parent is not None and parent not in self._told:
                continue
            key = self._keys.take(name)
            if key is not None:
                self._told[name] = key
                told.setdefault(tier, []).append(Block(key, content))
        # Faster tiers first, because blocks of a slower tier may follow blocks of a faster one.
        return [Told(tier, told[tier]) for tier in sorted(told)]

    def _agrees(self, digest: Digest) -> bool:
        tiers = np.array(self._digests[: len(digest) // DIGEST_BYTES], dtype="<u8")
        return np.bitwise_xor.accumulate(tiers, axis=0).tobytes() == digest


def _pieces(names: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    for start in range(0, len(names), MAX_BLOCKS):
        yield names[start : start + MAX_BLOCKS]
