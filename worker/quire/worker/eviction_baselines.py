"""Eviction policies to compare with: the known ones, and the one that knows the future.

Nothing is served with them. All but S3-FIFO and the optimum are a score, a pure function of what
a block was used for; it is asked when a block may be evicted, and the lowest score goes.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.worker.eviction import EvictionPolicy, EvictionQueue, PolicyFactory
from quire.worker.hashing import BlockHash

_NEVER = 1 << 60


class BlockUse(NamedTuple):
    """What is known of a cached block when it becomes evictable."""

    last_used: int
    """When its last holder let go, in ticks of the pool's clock."""
    num_hits: int
    """How often requests found it since it was last stored."""
    position: int
    """Index of its first token in the sequence."""
    num_blocks: int
    """Size of the pool: so many ticks after its last use, LRU would have evicted it."""
    price: float
    """The score of the block evicted last: what room in the cache is worth now."""


def lru(use: BlockUse) -> float:
    return use.last_used


def lfu(use: BlockUse) -> float:
    """Fewest hits first, among equals the one used longest ago."""
    return use.num_hits * 1e12 + use.last_used


def gdsf(use: BlockUse) -> float:
    """Greedy-Dual-Size-Frequency (Cherkasova 1998): price + frequency × cost, of equal sizes."""
    return use.price + (use.num_hits + 1) * (1 + use.position / 18_000)


def turnovers(use: BlockUse) -> float:
    """Each hit is worth one more turnover of the pool, the cost at most a quarter of one."""
    cost = use.position / (use.position + 18_000)
    return use.last_used + use.num_blocks * (min(use.num_hits, 4) + 0.25 * cost)


def by_score(score: Callable[[BlockUse], float]) -> PolicyFactory:
    return lambda num_blocks: _Scored(num_blocks, score)


class _Scored:
    def __init__(self, num_blocks: int, score: Callable[[BlockUse], float]) -> None:
        self._score = score
        self._num_blocks = num_blocks
        self._queue = EvictionQueue[float]()
        self._last_used = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._position = [0] * num_blocks
        self._price = 0.0

    def stored(self, block_id: int, block_hash: BlockHash, *, position: int, now: int) -> None:
        self._hits[block_id] = 0
        self._position[block_id] = position

    def hit(self, block_id: int) -> None:
        self._hits[block_id] += 1

    def held(self, block_id: int, *, now: int) -> None:
        self._queue.remove(block_id)

    def released(self, block_id: int, *, now: int) -> None:
        self._last_used[block_id] = now

    def offer(self, block_id: int, *, now: int) -> None:
        use = BlockUse(
            last_used=self._last_used[block_id],
            num_hits=self._hits[block_id],
            position=self._position[block_id],
            num_blocks=self._num_blocks,
            price=self._price,
        )
        self._queue.push(block_id, self._score(use))

    def evict(self, *, now: int) -> int:
        lowest = self._queue.lowest()
        assert lowest is not None
        self._price = lowest
        return self._queue.pop()


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


class _Furthest(_Scored):
    def __init__(self, num_blocks: int, next_use: Callable[[BlockHash], int]) -> None:
        super().__init__(num_blocks, lru)
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
