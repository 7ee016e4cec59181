"""A group's blocks: a plain least-recently-used pool that is fast, and the worker's real one.

Blocks are named as their tokens are scheduled. Blocks of answers are never named, because traces do
not contain answers.
"""

from collections import OrderedDict
from itertools import islice
from typing import Protocol

from quire.worker.api.events import EventLog
from quire.worker.api.hashing import BlockHash
from quire.worker.cache.blocks import BlockId, BlockPool
from quire.worker.cache.eviction import PolicyFactory

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


class LruPool:
    """Least recently used, in flat dictionaries.

    Cached blocks stand in order of release, ends of chains first. Whoever holds a block holds its
    parents, so that order alone never gives up a block before its children.
    """

    def __init__(self, *, num_blocks: int, log: EventLog) -> None:
        self.num_blocks = num_blocks
        self._log = log
        self._num_free = num_blocks
        self._held: dict[BlockHash, int] = {}  # To its references.
        self._cached: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_nameless: dict[int, int] = {}  # By request.

    @property
    def num_available(self) -> int:
        return self._num_free + len(self._cached)

    def match(self, chain: Chain, limit: int) -> int:
        held, cached = self._held, self._cached
        num_hits = 0
        for block in islice(chain, limit):
            if block not in held and block not in cached:
                break
            num_hits += 1
        return num_hits

    def admit(self, request_id: int, chain: Chain, num_hits: int, num_new: int) -> bool:
        held, cached = self._held, self._cached
        hits = chain[:num_hits]
        num_unheld = sum([block in cached for block in hits])
        if num_new > self._num_free + len(cached) - num_unheld:
            return False
        for block in hits:
            if block in held:
                held[block] += 1
            else:
                del cached[block]
                held[block] = 1
        num_missing = num_new - self._num_free
        if num_missing > 0:
            self._log.removed([cached.popitem(last=False)[0] for _ in range(num_missing)])
            self._num_free = 0
        else:
            self._num_free -= num_new
        self._num_nameless[request_id] = num_new
        return True

    def register(self, request_id: int, chain: Chain, begin: int, end: int) -> None:
        held, cached = self._held, self._cached
        stored: list[BlockHash] = []
        named = chain[begin:end]
        for block in named:
            if block in held:
                held[block] += 1
                self._num_free += 1
            elif block in cached:
                del cached[block]
                held[block] = 1
                self._num_free += 1
            else:
                held[block] = 1
                stored.append(block)
        self._num_nameless[request_id] -= len(named)
        if stored:
            self._log.stored(stored)

    def release(self, request_id: int, chain: Chain, end: int) -> None:
        held, cached = self._held, self._cached
        for block in reversed(chain[:end]):
            num_refs = held[block]
            if num_refs > 1:
                held[block] = num_refs - 1
            else:
                del held[block]
                cached[block] = None
        self._num_free += self._num_nameless.pop(request_id)


class WorkerPool:
    """The engine's block pool, with any of its eviction policies."""

    def __init__(
        self, *, num_blocks: int, block_size: int, log: EventLog, policy: PolicyFactory
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
