"""Which of several directory processes keeps a chain, where one process is not enough.

A chain is kept whole in one place, its *shard*, that of its first block: a look-up then asks one
shard, and no shard needs another's blocks to know that a chain has no holes.

What (almost) every prompt begins with would bring all of them to one shard. Such blocks are
*spread*: every shard keeps them, and a chain belongs to the shard of its first block that is not
spread. It still is whole there, and a look-up still asks one shard.

A shard is an ordinary `BlockDirectory`. Each group keeps a log for each shard, numbered and
digested on its own, and tells a shard of its chains only: docs/decisions/0026-sharded-directory.md.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NewType

from quire.router.directory import (
    Applied,
    BlockDirectory,
    DirectoryStats,
    GroupId,
    NeedsResync,
    Position,
)
from quire.worker.errors import ConfigError
from quire.worker.events import EventBatch
from quire.worker.hashing import BlockHash, BlockHashes

Shard = NewType("Shard", int)


def shard_of(first_block: BlockHash, *, num_shards: int) -> Shard:
    """The shard of all chains that begin with ``first_block``, from 0 to ``num_shards - 1``.

    Jump consistent hashing (Lamping and Veach, 2014): with one shard more, only the chains move
    that the new one gets, a share of ``1 / num_shards``.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: must be at least 1")
    key = int.from_bytes(first_block[:8], "little")
    shard, next_shard = 0, 0
    while next_shard < num_shards:
        shard = next_shard
        key = (key * 2862933555777941757 + 1) % 2**64
        next_shard = int((shard + 1) * (2**31 / ((key >> 33) + 1)))
    return Shard(shard)


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Where chains are kept. Groups and those who ask must have the same one.

    Raises:
        ConfigError: ``num_shards`` cannot work.
    """

    num_shards: int = 1
    spread: AbstractSet[BlockHash] = frozenset()
    """Blocks that every shard keeps: with each one all that come before it in its chain."""

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"num_shards={self.num_shards}: must be at least 1")

    def num_spread(self, chain: Sequence[BlockHash]) -> int:
        """How many blocks of the chain, from the first on, every shard keeps."""
        if not self.spread or not chain or chain[0] not in self.spread:
            return 0
        # Nothing behind a block that is not spread is: as many look-ups as the length has digits.
        return bisect_left(chain, True, key=lambda block: block not in self.spread)

    def shard_of(self, chain: Sequence[BlockHash]) -> Shard | None:
        """Where all of the chain is kept; None where every shard does so."""
        num_spread = self.num_spread(chain)
        if num_spread == len(chain):
            return None
        return shard_of(chain[num_spread], num_shards=self.num_shards)


class ShardedDirectory:
    """What a `BlockDirectory` says, from the shards that know it. Not safe for threads.

    All shards are in this process, as in the simulator; where they are processes of their own,
    this is what a gateway does by calls to them.
    """

    def __init__(
        self,
        shard_map: ShardMap,
        *,
        new_shard: Callable[[], BlockDirectory] = BlockDirectory,
    ) -> None:
        self._map = shard_map
        self._shards = [new_shard() for _ in range(shard_map.num_shards)]
        self._turns = itertools.cycle(range(shard_map.num_shards))

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[GroupId, int]:
        """See `BlockDirectory.longest_prefix`. Asks one shard."""
        hashes = BlockHashes.of(hashes)
        shard = self._map.shard_of(hashes)
        if shard is None:
            shard = Shard(next(self._turns))
        return self._shards[shard].longest_prefix(hashes)

    def apply(
        self, group_id: GroupId, batch: EventBatch, *, shard: Shard, now_s: float
    ) -> Applied | NeedsResync:
        """Takes in what the group's log for ``shard`` says; see `BlockDirectory.apply`."""
        return self._shards[shard].apply(group_id, batch, now_s=now_s)

    def position(self, group_id: GroupId, *, shard: Shard) -> Position:
        """From where on to ask the group's log for ``shard``."""
        return self._shards[shard].position(group_id)

    def drop(self, group_id: GroupId) -> None:
        """Forgets the group altogether. Its streams must have been closed."""
        for shard in self._shards:
            shard.drop(group_id)

    def expire(self, *, now_s: float) -> list[tuple[GroupId, Shard]]:
        """Forgets, shard by shard, the blocks of groups that were silent there for too long."""
        return [
            (group_id, Shard(index))
            for index, shard in enumerate(self._shards)
            for group_id in shard.expire(now_s=now_s)
        ]

    def stats(self) -> Sequence[DirectoryStats]:
        """Of each shard. A block that is spread counts in every one."""
        return [shard.stats() for shard in self._shards]
