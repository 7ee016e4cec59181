"""A group's blocks: the engine's pool, with the engine's eviction policy or plain LRU.

Blocks are named as their tokens are scheduled. Blocks of answers are never named, because traces do
not contain answers.
"""

from itertools import islice
from typing import Protocol

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.cache.eviction import EvictionQueue, PolicyFactory

Chain = tuple[BlockHash, ...]


class Pool(Protocol):
    """The block pool that a simulated group needs."""

    num_blocks: int

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""

    def match(self, chain: Chain, limit: int) -> int:
        """How many blocks of the chain's beginning are registered, ``limit`` at most."""

    def admit(self, request_id: int, chain: Chain, num_hits: int, num_new: int) -> bool:
        """Holds a match and takes new blocks, or does nothing where they are not available."""

    def register(self, request_id: int, chain: Chain, begin: int, end: int) -> None:
        """Names blocks ``begin`` to ``end`` of an admitted request, as far as the chain goes."""

    def release(self, request_id: int, chain: Chain, end: int) -> None:
        """Lets go of all blocks of a request, the first ``end`` of which are registered."""


class Lru:
    """Evicts the block that was used longest ago."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = EvictionQueue[int]()
        self._last_used = [0] * num_blocks

    def stored(
        self, block_id: int, block_hash: BlockHash, *, position: int, now: int, num_hits: int = 0
    ) -> None:
        pass

    def hit(self, block_id: int) -> None:
        pass

    def num_hits(self, block_id: int) -> int:
        return 0

    def held(self, block_id: int, *, now: int) -> None:
        self._queue.remove(block_id)

    def released(self, block_id: int, *, now: int) -> None:
        self._last_used[block_id] = now

    def offer(self, block_id: int, *, now: int) -> None:
        self._queue.push(block_id, self._last_used[block_id])

    def evict(self, *, now: int) -> int:
        return self._queue.pop()


class WorkerPool:
    """The engine's block pool, with any of its eviction policies."""

    def __init__(
        self, *, num_blocks: int, block_size: int, log: EventLog, policy: PolicyFactory = Lru
    ) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks=num_blocks, block_size=block_size, log=log, policy=policy)
        self._tables: dict[int, list[BlockId]] = {}

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    def match(self, chain: Chain, limit: int) -> int:
        return len(self._pool.match(islice(chain, limit)))

    def admit(self, request_id: int, chain: Chain, num_hits: int, num_new: int) -> bool:
        hits = self._pool.match(chain[:num_hits])
        if num_new > self._pool.num_available - self._pool.num_unheld(hits):
            return False
        self._pool.acquire(hits)
        self._tables[request_id] = hits + self._pool.allocate(num_new)
        return True

    def register(self, request_id: int, chain: Chain, begin: int, end: int) -> None:
        end = min(end, len(chain))
        if end <= begin:
            return
        table = self._tables[request_id]
        own = table[begin:end]
        parent = table[begin - 1] if begin else None
        named = self._pool.register(own, chain[begin:end], parent=parent)
        table[begin:end] = named
        self._pool.release([a for a, b in zip(own, named, strict=True) if a != b])

    def release(self, request_id: int, chain: Chain, end: int) -> None:
        self._pool.release(self._tables.pop(request_id))
