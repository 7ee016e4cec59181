"""Eviction policies to compare with: two known ones, and the one that knows the future."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence

from quire.simulate.pool import Lru as Lru
from quire.worker.api.hashing import BlockHash
from quire.worker.cache.eviction import EvictionPolicy, EvictionQueue

_NEVER = 1 << 60


class S3Fifo:
    """S3-FIFO (SOSP'23): a probation of a tenth of the pool, hits count up to 3, ghosts.

    The FIFO order of a block is that of its first offer, since only blocks without children can
    go: a block that is hit keeps its place, as in the paper.
    """

    def __init__(self, num_blocks: int) -> None:
        self._probation_limit = num_blocks // 10
        self._num_blocks = num_blocks
        self._probation, self._main = EvictionQueue[int](), EvictionQueue[int]()
        self._in_main = [False] * num_blocks
        self._hits = [0] * num_blocks
        self._place: list[int | None] = [None] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_on_probation = 0
        self._next_place = 0

    def stored(self, block_id: int, block_hash: BlockHash, *, position: int, now: int) -> None:
        self._hash_of[block_id] = block_hash
        self._hits[block_id] = 0
        self._place[block_id] = None
        self._in_main[block_id] = block_hash in self._ghosts
        if self._in_main[block_id]:
            del self._ghosts[block_hash]
        else:
            self._num_on_probation += 1

    def hit(self, block_id: int) -> None:
        self._hits[block_id] = min(self._hits[block_id] + 1, 3)

    def held(self, block_id: int, *, now: int) -> None:
        self._probation.remove(block_id)
        self._main.remove(block_id)

    def released(self, block_id: int, *, now: int) -> None:
        pass

    def offer(self, block_id: int, *, now: int) -> None:
        place = self._place[block_id]
        if place is None:
            self._place[block_id] = place = self._next_place
            self._next_place += 1
        (self._main if self._in_main[block_id] else self._probation).push(block_id, place)

    def evict(self, *, now: int) -> int:
        while True:
            is_full = self._num_on_probation >= self._probation_limit
            if len(self._probation) and (is_full or not len(self._main)):
                block_id = self._probation.pop()
                self._num_on_probation -= 1
                if self._hits[block_id] == 0:
                    self._remember(block_id)
                    return block_id
                self._in_main[block_id] = True
                self._hits[block_id] = 0
            else:
                block_id = self._main.pop()
                if self._hits[block_id] == 0:
                    return block_id
                self._hits[block_id] -= 1
            self._place[block_id] = None
            self.offer(block_id, now=now)

    def _remember(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        self._ghosts[block_hash] = None
        if len(self._ghosts) > self._num_blocks:
            self._ghosts.popitem(last=False)


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

    def stored(self, block_id: int, block_hash: BlockHash, *, position: int, now: int) -> None:
        self._hash_at[block_id] = block_hash

    def released(self, block_id: int, *, now: int) -> None:
        block_hash = self._hash_at[block_id]
        assert block_hash is not None
        self._next[block_id] = self._next_use(block_hash)

    def offer(self, block_id: int, *, now: int) -> None:
        self._queue.push(block_id, -self._next[block_id])
