"""Eviction policies: choose the cached block to evict when a new block is needed.

A *policy* observes the events of one pool's registered blocks and chooses the block to evict. It
only chooses among blocks that the pool offers: those that nobody holds and that have no children.
So no policy can cut a chain in its middle or keep its end longer than its beginning. A policy
uses neither clock nor randomness: the same events give the same choices.

``now`` is the pool's clock: it ticks once per block allocated. A block's *age* is the ticks since
its last holder released it. At an age equal to the pool's size, plain LRU would have evicted it.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from quire.worker.blocks.hashing import BlockHash


class EvictionPolicy(Protocol):
    """The events of a pool. An id is below ``num_blocks`` and identifies a block while it is
    registered."""

    def stored(
        self, block_id: int, block_hash: BlockHash, *, position: int, now: int, num_hits: int = 0
    ) -> None:
        """The block was registered. ``position`` is its first token's index in the sequence;
        ``num_hits`` are its hits outside this pool."""

    def hit(self, block_id: int) -> None:
        """A request found the block, which was cached or held by other requests."""

    def num_hits(self, block_id: int) -> int:
        """How often requests have found the block, as far as the policy counts."""

    def held(self, block_id: int, *, now: int) -> None:
        """The cached block is held again and cannot be evicted."""

    def released(self, block_id: int, *, now: int) -> None:
        """The last holder released the block, which is now cached."""

    def offer(self, block_id: int, *, now: int) -> None:
        """The cached block has no children (any more): it may be evicted."""

    def evict(self, *, now: int) -> int:
        """Chooses one of the offered blocks, of which there must be one. It is unregistered."""


PolicyFactory = Callable[[int], EvictionPolicy]
"""Makes the policy of a pool with a number of blocks."""

_NUM_CLASSES = 7
"""Classes by hits: 0, 1, 2–3, 4–7, 8–15, 16–31, more. More classes would learn more slowly."""
_MAX_HITS = 255
_BUCKETS_PER_POOL = 16
"""The first bucket of ages covers 1/16 of the pool's turnover; each next one is twice as wide."""
_NUM_BUCKETS = 8
"""The last bucket begins at 8 turnovers of the pool. Ghosts are hardly remembered for so long: a
block that has waited longer than any that was requested again is worth nothing."""
_GHOSTS_PER_BLOCK = 4
_MAX_GHOSTS = 2_000_000
_DECAY = 0.93
"""Share of the counts that remains after half a turnover of the pool."""
_CHOICES_PER_POOL = 64
"""Worths are compared again at the latest after 1/64 of the pool was allocated."""


class LowestUtility:
    """Evicts the block with the fewest expected hits per tick of residence.

    Blocks with similar numbers of hits form a class. For each class, the policy learns how many
    blocks are requested again at which age, also after eviction: *ghosts* are the names of evicted
    blocks, with their hits. This gives the worth of a block at an age: hits per block and tick if
    kept for the best time from now on (its Gittins index; with a fixed time this is the hit density
    of LHD, NSDI'18). The policy evicts the oldest block of the class and age with the least worth:
    the oldest of all if worth falls with age, and one of the newest if it rises, as for blocks that
    are requested again after a fixed period.

    O(log n) per event; remembers `_GHOSTS_PER_BLOCK` evicted blocks for each block of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._hits = bytearray(num_blocks)
        self._class_of = bytearray(num_blocks)
        self._since = array("q", bytes(8 * num_blocks))
        # Blocks on offer by class and age. Blocks move to the next age when worths are compared.
        self._queues = [
            [EvictionQueue[int]() for _ in range(_NUM_BUCKETS)] for _ in range(_NUM_CLASSES)
        ]
        self._queue_of = bytearray(num_blocks)
        # Evicted blocks, oldest first: hits, class and the tick at which they were released.
        self._ghosts: OrderedDict[BlockHash, tuple[int, int, int]] = OrderedDict()
        self._max_ghosts = min(_GHOSTS_PER_BLOCK * num_blocks, _MAX_GHOSTS)
        self._released = [0.0] * _NUM_CLASSES
        self._returned = [[0.0] * _NUM_BUCKETS for _ in range(_NUM_CLASSES)]
        self._worth = [[0.0] * _NUM_BUCKETS for _ in range(_NUM_CLASSES)]
        self._next_learning = 0
        self._choice = self._queues[0][0]  # The queue with the least worth.
        self._next_choice = 0

    def stored(
        self, block_id: int, block_hash: BlockHash, *, position: int, now: int, num_hits: int = 0
    ) -> None:
        self._hash_of[block_id] = block_hash
        ghost = self._ghosts.pop(block_hash, None)
        if ghost is not None:
            hits, class_id, since = ghost
            self._returned[class_id][self._bucket(now - since)] += 1
            num_hits = max(num_hits, hits + 1)
        self._hits[block_id] = min(num_hits, _MAX_HITS)

    def num_hits(self, block_id: int) -> int:
        return self._hits[block_id]

    def hit(self, block_id: int) -> None:
        self._hits[block_id] = min(self._hits[block_id] + 1, _MAX_HITS)

    def held(self, block_id: int, *, now: int) -> None:
        class_id = self._class_of[block_id]
        self._returned[class_id][self._bucket(now - self._since[block_id])] += 1
        self._queues[class_id][self._queue_of[block_id]].remove(block_id)

    def released(self, block_id: int, *, now: int) -> None:
        class_id = min(self._hits[block_id].bit_length(), _NUM_CLASSES - 1)
        self._class_of[block_id] = class_id
        self._since[block_id] = now
        self._released[class_id] += 1

    def offer(self, block_id: int, *, now: int) -> None:
        since = self._since[block_id]
        self._queue_of[block_id] = bucket = self._bucket(now - since)
        self._queues[self._class_of[block_id]][bucket].push(block_id, since)

    def withdraw(self, block_id: int) -> None:
        """The block stays cached, but may not be evicted until it is offered again."""
        self._queues[self._class_of[block_id]][self._queue_of[block_id]].remove(block_id)

    def evict(self, *, now: int) -> int:
        if now >= self._next_choice or self._choice.lowest() is None:
            self._choose(now)
        block_id = self._choice.pop()
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        self._hash_of[block_id] = None
        self._ghosts[block_hash] = (
            self._hits[block_id],
            self._class_of[block_id],
            self._since[block_id],
        )
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return block_id

    def _choose(self, now: int) -> None:
        """Finds the class and age with the least worth; of equals, that with the oldest block."""
        if now >= self._next_learning:
            self._learn()
            self._next_learning = now + max(self._num_blocks // 2, 64)
        least: tuple[float, int] | None = None
        for queues, worths in zip(self._queues, self._worth, strict=True):
            for bucket, (queue, worth) in enumerate(zip(queues, worths, strict=True)):
                oldest = self._oldest(queues, bucket, now)
                if oldest is not None and (least is None or (worth, oldest) < least):
                    least = worth, oldest
                    self._choice = queue
        self._next_choice = now + self._num_blocks // _CHOICES_PER_POOL + 1

    def _oldest(self, queues: list["EvictionQueue[int]"], bucket: int, now: int) -> int | None:
        """The tick at which the oldest block of a bucket was released; ``None`` if it is empty.
        First moves blocks that are too old to the next bucket."""
        queue = queues[bucket]
        while (since := queue.lowest()) is not None and self._bucket(now - since) > bucket:
            block_id = queue.pop()
            self._queue_of[block_id] = bucket + 1
            queues[bucket + 1].push(block_id, since)
        return since

    def _bucket(self, age: int) -> int:
        bucket = (age * _BUCKETS_PER_POOL // self._num_blocks + 1).bit_length() - 1
        return bucket if bucket < _NUM_BUCKETS else _NUM_BUCKETS - 1

    def _learn(self) -> None:
        """Computes the worth of blocks from the counts, and decays the counts.

        Counts of released and of returned blocks decay alike, so that in a steady state their ratio
        is the share that returns, without waiting for blocks that may still return. Before that, a
        class looks worse than it is, and classes of many hits reach it last. So a class is never
        worth less than one with fewer hits.
        """
        floor = [0.0] * _NUM_BUCKETS
        for class_id, returned in enumerate(self._returned):
            worth = _worth_by_age(self._released[class_id], returned)
            self._worth[class_id] = floor = [max(pair) for pair in zip(worth, floor, strict=True)]
            self._released[class_id] *= _DECAY
            self._returned[class_id] = [_DECAY * count for count in returned]


def _worth_by_age(num_released: float, returned: list[float]) -> list[float]:
    """For each bucket of ages, the hits per tick of a block that has reached it.

    The block is assumed to be kept until the end of the bucket that maximizes this ratio: late
    hits count only as far as they pay for the wait.
    """
    hits: list[float] = []
    ticks: list[float] = []
    num_left = num_released + 1  # Plus one that never returns: few samples show little.
    for bucket, count in enumerate(returned):
        # The releases have decayed for longer than the returns, so more may return than are left.
        num_left = max(num_left, count)
        hits.append(count)
        ticks.append((num_left - count / 2) * 2**bucket)
        num_left = max(num_left - count, 1.0)
    return [
        max(
            sum(hits[bucket:end]) / sum(ticks[bucket:end])
            for end in range(bucket + 1, len(hits) + 1)
        )
        for bucket in range(len(hits))
    ]


Score = TypeVar("Score", int, float)


class EvictionQueue(Generic[Score]):
    """A priority queue of blocks by score. Operations are O(log n); `remove` leaves a stale entry
    that `pop` skips."""

    def __init__(self) -> None:
        self._scores: dict[int, Score] = {}
        self._heap: list[tuple[Score, int]] = []

    def __len__(self) -> int:
        return len(self._scores)

    def push(self, block_id: int, score: Score) -> None:
        self._scores[block_id] = score
        heapq.heappush(self._heap, (score, block_id))
        if len(self._heap) > 2 * len(self._scores) + 64:
            self._heap = [(score, block_id) for block_id, score in self._scores.items()]
            heapq.heapify(self._heap)

    def remove(self, block_id: int) -> None:
        """Removes ``block_id`` if it is in the queue."""
        self._scores.pop(block_id, None)

    def lowest(self) -> Score | None:
        """The lowest score; ``None`` for an empty queue."""
        heap, scores = self._heap, self._scores
        while heap:
            score, block_id = heap[0]
            if scores.get(block_id) == score:
                return score
            heapq.heappop(heap)
        return None

    def pop(self) -> int:
        """Removes and returns the block with the lowest score. The queue must not be empty."""
        while True:
            score, block_id = heapq.heappop(self._heap)
            if self._scores.get(block_id) == score:
                del self._scores[block_id]
                return block_id
