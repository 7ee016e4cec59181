"""The block pool of a KV cache: tracks which blocks are free, held or cached.

    free    nobody holds it and its contents mean nothing
    held    it has ``refs > 0`` references, from sequences or transfers
    cached  nobody holds it, but its contents are a known prefix

``held + cached + free == num_blocks`` after every call.

A full block can be *registered* under its hash; no two blocks have the same hash. A sequence that
holds a registered block also holds the registered block before it (its *parent*), and only blocks
without children are evicted. So a chain is evicted from its end and never has holes.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NewType

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.eviction import LowestUtility, PolicyFactory
from quire.worker.cache.retention import Retention
from quire.worker.request.errors import NoFreeBlocks

BlockId = NewType("BlockId", int)

Spill = Callable[[BlockId, BlockHash, BlockHash | None], None]
"""Called with a block that is about to be evicted, its name and its parent's name. The block and
all blocks before it are still intact."""

_NO_PARENT = -1


class BlockPool:
    """All blocks of one group's KV cache. Every operation is O(log n) per block or better."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        log: EventLog,
        policy: PolicyFactory = LowestUtility,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """``seconds`` is the clock of `keep`."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.log = log
        """Receives the events of registered and evicted blocks."""
        self._policy = policy(num_blocks)

        # Flat arrays by block id: a pool may have millions of blocks.
        self._refs = array("i", bytes(4 * num_blocks))
        self._index = array("i", bytes(4 * num_blocks))  # Position in the block's chain.
        self._parent = array("i", bytes(4 * num_blocks))
        self._num_children = array("i", bytes(4 * num_blocks))
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, BlockId] = {}

        self._returned: list[BlockId] = []  # Free blocks that have been used before.
        self._num_ever_used = 0  # Blocks from this id on have never been used.
        self._num_cached = 0
        self.spill: Spill | None = None
        self._retention = Retention(num_blocks)
        self._seconds = seconds
        self._num_offered = 0  # Cached blocks that the policy may evict.
        self._clock = 0  # Ticks once per block allocated.

    @property
    def num_free(self) -> int:
        return len(self._returned) + self.num_blocks - self._num_ever_used

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self._num_cached

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can take: those that nobody holds."""
        return self.num_free + self._num_cached

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks of the longest registered prefix of a chain. Adds no references."""
        block_ids: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def is_registered(self, block_hash: BlockHash) -> bool:
        """Whether a block is registered under this hash."""
        return block_hash in self._block_of

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block registered under this hash, if any. Adds no reference."""
        return self._block_of.get(block_hash)

    def named(self, block_id: BlockId) -> tuple[BlockHash, BlockHash | None]:
        """A registered block's name, and its parent's name."""
        block_hash, parent = self._hash_of[block_id], self._parent[block_id]
        assert block_hash is not None, f"block {block_id} has no name"
        return block_hash, None if parent == _NO_PARENT else self._hash_of[parent]

    def most_useful(self, num_blocks: int) -> list[BlockId]:
        """At most ``num_blocks`` registered blocks: those with the most hits, and all blocks before
        them in their chains. Parents come before children."""
        hits = self._policy.num_hits
        found: dict[BlockId, None] = {}
        for _, block_id in sorted(
            ((-hits(each), each) for each in self._block_of.values()), key=lambda pair: pair[0]
        ):
            chain = []
            at: BlockId | None = block_id
            while at is not None and at not in found:
                chain.append(at)
                parent = self._parent[at]
                at = None if parent == _NO_PARENT else BlockId(parent)
            if len(found) + len(chain) <= num_blocks:
                found.update(dict.fromkeys(reversed(chain)))
            if len(found) >= num_blocks:
                break
        return list(found)

    def num_hits(self, block_id: BlockId) -> int:
        """How often requests have found a registered block."""
        return self._policy.num_hits(block_id)

    def hold(self, block_ids: Iterable[BlockId]) -> None:
        """Adds a reference to each registered block without counting a hit."""
        for block_id in block_ids:
            self._hold(block_id)

    def disown(self, block_hash: BlockHash) -> list[BlockHash]:
        """Unregisters a block and all its descendants, so that no request finds them. Returns their
        names. Held blocks stay with their holders until they are released."""
        first = self._block_of.get(block_hash)
        if first is None:
            return []
        # Parents first: a block whose parent is unregistered is unregistered too.
        lost: dict[BlockId, BlockHash] = {first: block_hash}
        more = True
        while more:
            children = {
                block_id: name
                for name, block_id in self._block_of.items()
                if block_id not in lost and self._parent[block_id] in lost
            }
            lost |= children
            more = bool(children)
        for block_id, name in reversed(lost.items()):
            self._forget(block_id, name)
        self.log.removed(lost.values())
        return list(lost.values())

    def num_unheld(self, block_ids: Iterable[BlockId]) -> int:
        """How many of these registered blocks are available, so that `acquire` would take them."""
        refs = self._refs
        return sum(refs[block_id] == 0 for block_id in block_ids)

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Adds a reference to each block of a match, and counts a hit.

        A caller that also needs new blocks must acquire first, so that `allocate` cannot evict the
        matched blocks.
        """
        for block_id in block_ids:
            self._hold(block_id)
            self._policy.hit(block_id)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Allocates blocks for one holder to write: free blocks first, then evicted ones.

        Raises:
            NoFreeBlocks: Fewer are available. Nothing was taken.
        """
        if num_blocks > self.num_available:
            raise NoFreeBlocks(needed=num_blocks, available=self.num_available)
        taken = [self._take_free() for _ in range(min(num_blocks, self.num_free))]
        evicted: list[BlockHash] = []
        if len(taken) < num_blocks and self._retention:
            for block_id in self._retention.expire(self._seconds()):
                self._offer(block_id)
        while len(taken) < num_blocks:
            block_id, block_hash = self._evict()
            taken.append(block_id)
            evicted.append(block_hash)
        self.log.removed(evicted)
        for block_id in taken:
            self._refs[block_id] = 1
        self._clock += num_blocks
        return taken

    def register(
        self,
        block_ids: Iterable[BlockId],
        hashes: Sequence[BlockHash],
        *,
        parent: BlockId | None,
        num_hits: Sequence[int] = (),
    ) -> list[BlockId]:
        """Registers full blocks of one holder, in chain order, so that requests can find them.

        ``parent`` is the registered block before the first one. ``num_hits`` are the hits that each
        block had outside this pool. Returns the block registered under each hash. If that is an
        older block, the caller's own block stays unregistered and the caller now holds both. It
        must keep the returned one, and release its own when no step writes to it any more.
        """
        named: list[BlockId] = []
        stored: list[BlockHash] = []
        for index, (own, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                block_id = own
                self._name(block_id, block_hash, parent, num_hits[index] if num_hits else 0)
                stored.append(block_hash)
            else:
                self._hold(block_id)
            named.append(block_id)
            parent = block_id
        self.log.stored(stored)
        return named

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drops one reference to each block. Blocks must be in chain order.

        A block without references becomes cached if it is registered, and else free.
        """
        for block_id in reversed(block_ids):
            self._refs[block_id] -= 1
            if self._refs[block_id] > 0:
                continue
            assert self._refs[block_id] == 0, f"block {block_id} was released too often"
            if self._hash_of[block_id] is None:
                self._returned.append(block_id)
                continue
            self._num_cached += 1
            self._policy.released(block_id, now=self._clock)
            if self._num_children[block_id] == 0:
                self._offer(block_id)

    def keep(self, block_ids: Sequence[BlockId], *, tenant: str, keep_s: float) -> None:
        """Keeps registered blocks cached for ``keep_s`` seconds, within the tenant's share."""
        until_s = self._seconds() + keep_s
        # Reversed: above the share, the end of the chain is dropped first.
        for block_id in reversed(block_ids):
            for let_go in self._retention.keep(block_id, tenant=tenant, until_s=until_s):
                self._offer(let_go)

    def reset(self) -> bool:
        """Forgets every cached block. Returns false, and forgets none, while any block is held."""
        if self.num_held:
            return False
        evicted = [self._evict(spills=False) for _ in range(self._num_cached)]
        self._returned.extend(block_id for block_id, _ in evicted)
        self.log.removed(block_hash for _, block_hash in evicted)
        return True

    def _hold(self, block_id: BlockId) -> None:
        """Adds a reference to a registered block."""
        if self._refs[block_id] == 0:
            if self._num_children[block_id] == 0 and not self._retention.held(block_id):
                self._num_offered -= 1
            self._num_cached -= 1
            self._policy.held(block_id, now=self._clock)
        self._refs[block_id] += 1

    def _name(
        self, block_id: BlockId, block_hash: BlockHash, parent: BlockId | None, num_hits: int
    ) -> None:
        assert self._hash_of[block_id] is None, f"block {block_id} already has a hash"
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        if parent is None:
            self._parent[block_id] = _NO_PARENT
            self._index[block_id] = 0
        else:
            assert self._refs[parent] > 0, f"parent {parent} of block {block_id} is not held"
            self._parent[block_id] = parent
            self._index[block_id] = self._index[parent] + 1
            self._num_children[parent] += 1
        position = self._index[block_id] * self.block_size
        self._policy.stored(
            block_id, block_hash, position=position, now=self._clock, num_hits=num_hits
        )

    def _take_free(self) -> BlockId:
        if self._returned:
            return self._returned.pop()
        self._num_ever_used += 1
        return BlockId(self._num_ever_used - 1)

    def _offer(self, block_id: int) -> None:
        """Lets a cached block without children be evicted, unless a client asked to keep it."""
        if not self._retention.waits(block_id):
            self._policy.offer(block_id, now=self._clock)
            self._num_offered += 1

    def _evict(self, *, spills: bool = True) -> tuple[BlockId, BlockHash]:
        """Evicts the cached block that the policy chooses."""
        if not self._num_offered:
            let_go = self._retention.give_up()
            assert let_go is not None, "no cached block is without children"
            self._offer(let_go)
        self._num_offered -= 1
        block_id = BlockId(self._policy.evict(now=self._clock))
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        if spills and self.spill is not None:
            self.spill(block_id, *self.named(block_id))
        self._hash_of[block_id] = None
        del self._block_of[block_hash]
        self._retention.forget(block_id)
        self._num_cached -= 1
        self._leave(block_id)
        return block_id, block_hash

    def _forget(self, block_id: BlockId, name: BlockHash) -> None:
        """Unregisters a block."""
        is_waiting = self._retention.held(block_id)
        self._retention.forget(block_id)
        del self._block_of[name]
        self._hash_of[block_id] = None
        if not self._refs[block_id]:
            self._policy.held(block_id, now=self._clock)  # Withdraws it from eviction.
            self._num_offered -= self._num_children[block_id] == 0 and not is_waiting
            self._num_cached -= 1
            self._returned.append(block_id)
        self._leave(block_id)

    def _leave(self, block_id: BlockId) -> None:
        """Removes a block from its chain. Its parent may be evicted if it was the last child."""
        parent = self._parent[block_id]
        if parent != _NO_PARENT:
            self._num_children[parent] -= 1
            if self._num_children[parent] == 0 and self._refs[parent] == 0:
                self._offer(parent)
        self._parent[block_id] = _NO_PARENT
