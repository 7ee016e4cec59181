"""Eviction policies to compare with: a known one, and the optimal one, which knows the future."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from quire.simulate.pool import Lru as Lru
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.eviction import EvictionPolicy

_NEVER = 1 << 60


class FurthestNextUse:
    """Belady's optimum, from the future: the block goes whose next use is furthest away.

    It needs no change for chains: whatever uses a block uses its parents too, so that a parent's
    next use is never later, and of equals the end of a chain is offered first. Optimal in hits;
    with costs that differ, or with requests side by side, it is a bound only in practice.
    """

    def __init__(self, chains: Sequence[Sequence[BlockHash]]) -> None:
        self._uses: dict[BlockHash, list[int]] = {}
        for index, chain in enumerate(chains):
            for block_hash in chain:
                self._uses.setdefault(block_hash, []).append(index)
        self._now = 0

    def begin(self, index: int) -> None:
        """Request ``index`` of ``chains`` is next."""
        self._now = index

    def policy(self, num_blocks: int) -> EvictionPolicy:
        """For one pool, whose requests are announced by `begin`."""
        return _Furthest(num_blocks, self._next_use)

    def _next_use(self, block_hash: BlockHash) -> int:
        uses = self._uses.get(block_hash, ())  # None, where decode made the block.
        later = bisect_right(uses, self._now)
        return uses[later] if later < len(uses) else _NEVER


class _Furthest(Lru):
    def __init__(self, num_blocks: int, next_use: Callable[[BlockHash], int]) -> None:
        super().__init__(num_blocks)
        self._next_use = next_use
        self._next = [0] * num_blocks
        self._hash_at: list[BlockHash | None] = [None] * num_blocks

    def stored(
        self, block_id: int, block_hash: BlockHash, *, position: int, now: int, num_hits: int = 0
    ) -> None:
        self._hash_at[block_id] = block_hash

    def released(self, block_id: int, *, now: int) -> None:
        block_hash = self._hash_at[block_id]
        assert block_hash is not None
        self._next[block_id] = self._next_use(block_hash)

    def offer(self, block_id: int, *, now: int) -> None:
        self._queue.push(block_id, -self._next[block_id])
