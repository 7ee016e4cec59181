"""Blocks that are kept in host memory, and the slots through which others travel.

    free       nothing lies there
    in use     a thread or a step reads or writes it
    kept       a block that the KV cache has evicted, or a copy of one that it has again

``free + in use + kept == num_slots`` after every call. A kept block is evicted only while no step
and no thread reads it, and only if no kept block comes behind it in its chain: first copies of what
the KV cache has too, then the one that was used longest ago, where each doubling of its hits counts
as a turnover of the slots.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from quire.worker.api.events import EventLog
from quire.worker.api.hashing import BlockHash
from quire.worker.cache.copies import Slot
from quire.worker.cache.eviction import EvictionQueue

HOST_TIER = 1


class Shelf:
    """Used from the engine's thread."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_kept: int,
        log: EventLog,
    ) -> None:
        """``max_kept`` of the slots may keep blocks; 0 keeps none. The log hears of those."""
        self.num_slots = num_slots
        self.max_kept = min(max_kept, num_slots)
        self._log = log
        self._evictable = EvictionQueue[int]()
        self._scores = array("q", bytes(8 * num_slots))
        self._free = [Slot(slot) for slot in reversed(range(num_slots))]
        self._slot_of: dict[BlockHash, Slot] = {}
        self._name_of: list[tuple[BlockHash, BlockHash | None] | None] = [None] * num_slots
        self._checksums: list[bytes] = [b""] * num_slots
        self._pins = array("i", bytes(4 * num_slots))
        self._num_children: Counter[BlockHash] = Counter()
        self._spare: dict[BlockHash, None] = {}
        self._clock = 0  # Ticks once per block kept.

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._slot_of)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slot_of

    def find(self, block_hash: BlockHash) -> Slot | None:
        return self._slot_of.get(block_hash)

    def match(self, hashes: Iterable[BlockHash]) -> list[Slot]:
        """The slots of the longest kept beginning of ``hashes``. Takes nothing."""
        slots = []
        for block_hash in hashes:
            slot = self._slot_of.get(block_hash)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def parent(self, block_hash: BlockHash) -> BlockHash | None:
        """The name of the block before a kept one."""
        named = self._name_of[self._slot_of[block_hash]]
        assert named is not None
        return named[1]

    def take(self, num_slots: int) -> list[Slot]:
        """At most that many free slots, which are in use from now on until `give_back`."""
        return [self._free.pop() for _ in range(min(num_slots, len(self._free)))]

    def give_back(self, slots: Iterable[Slot]) -> None:
        self._free.extend(slots)

    def keep(
        self, block_hash: BlockHash, parent: BlockHash | None, *, num_hits: int
    ) -> Slot | None:
        """A slot for a block that the KV cache evicts, which the caller fills; ``None`` where it is
        not kept, or has its slot already."""
        slot = self._slot_of.get(block_hash)
        if slot is not None:
            if block_hash in self._spare:
                del self._spare[block_hash]
                self._use(slot, num_hits)
                self._offer(slot)
            return None
        if self.num_kept >= self.max_kept and not self._evict():
            return None
        if not self._free:
            return None
        slot = self._free.pop()
        self._clock += 1
        self._slot_of[block_hash] = slot
        self._name_of[slot] = block_hash, parent
        self._checksums[slot] = b""
        if parent is not None:
            self._num_children[parent] += 1
            if parent in self._slot_of:
                self._evictable.remove(self._slot_of[parent])
        self._use(slot, num_hits)
        self._offer(slot)
        self._log.stored([block_hash], tier=HOST_TIER)
        return slot

    def loaded(self, slots: Iterable[Slot]) -> None:
        """The KV cache has these blocks again: they are the first to go."""
        for slot in slots:
            named = self._name_of[slot]
            assert named is not None
            self._evictable.remove(slot)
            self._spare[named[0]] = None

    def checksum(self, slot: Slot) -> bytes:
        """Of the kept block's bytes; empty where nobody has computed it."""
        return self._checksums[slot]

    def set_checksum(self, slot: Slot, checksum: bytes) -> None:
        self._checksums[slot] = checksum

    def pin(self, slot: Slot) -> None:
        """A step or a thread reads the kept block: it is not evicted until `unpin`."""
        self._pins[slot] += 1
        self._evictable.remove(slot)

    def unpin(self, slot: Slot) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            if self._name_of[slot] is None:
                self._free.append(slot)  # It was dropped meanwhile.
            else:
                self._offer(slot)

    def drop(self, block_hash: BlockHash) -> None:
        """Forgets a kept block."""
        self._forget(self._slot_of[block_hash])

    def reset(self) -> None:
        """Forgets all kept blocks."""
        for block_hash in list(self._slot_of):
            self.drop(block_hash)

    def _use(self, slot: Slot, num_hits: int) -> None:
        self._scores[slot] = self._clock + self.num_slots * (num_hits + 1).bit_length()

    def _offer(self, slot: Slot) -> None:
        """Lets the kept block be evicted, where nothing speaks against it."""
        named = self._name_of[slot]
        assert named is not None
        is_last = not self._num_children[named[0]]
        if is_last and not self._pins[slot] and named[0] not in self._spare:
            self._evictable.push(slot, self._scores[slot])

    def _evict(self) -> bool:
        """Makes room for one block, if it can."""
        for block_hash in self._spare:
            slot = self._slot_of[block_hash]
            if not self._pins[slot]:
                self._forget(slot)
                return True
        if not self._evictable:
            return False
        self._forget(Slot(self._evictable.pop()))
        return True

    def _forget(self, slot: Slot) -> None:
        named = self._name_of[slot]
        assert named is not None
        block_hash, parent = named
        del self._slot_of[block_hash]
        self._name_of[slot] = None
        self._evictable.remove(slot)
        self._spare.pop(block_hash, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                before = self._slot_of.get(parent)
                if before is not None:
                    self._offer(before)
        self._log.removed([block_hash], tier=HOST_TIER)
        if not self._pins[slot]:
            self._free.append(slot)
