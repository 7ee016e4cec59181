"""The slots of host memory: they keep blocks evicted from the KV cache, and carry transfers.

    free       the slot is unused
    in use     a thread or a step reads or writes it
    kept       it has a block that the KV cache has evicted, or a copy of one that it has again

``free + in use + kept == num_slots`` after every call. A kept block is evicted only while no step
and no thread uses its slot, and only if no kept block follows it in its chain. Copies of blocks
that the KV cache has too are evicted first, then the block with the least expected hits, as in the
KV cache (`quire.worker.cache.eviction`). A block's hit count moves with it between the tiers, or
each tier would know only a part of the hits.
"""

import threading
from array import array
from collections.abc import Iterable, Sequence

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.eviction import LowestUtility
from quire.worker.engine.part import Slot

HOST_TIER = 1


class HostTier:
    """Used from the engine's thread, except `pin_all`."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_kept: int,
        log: EventLog,
    ) -> None:
        """At most ``max_kept`` slots keep blocks; 0 keeps none. Kept blocks are logged."""
        self.num_slots = num_slots
        self.max_kept = min(max_kept, num_slots)
        self._log = log
        self._policy = LowestUtility(num_slots)
        self._is_offered = bytearray(num_slots)
        self._num_offered = 0
        self._free = [Slot(slot) for slot in reversed(range(num_slots))]
        self._slot_of: dict[BlockHash, Slot] = {}
        self._name_of: list[tuple[BlockHash, BlockHash | None] | None] = [None] * num_slots
        self._checksums: list[bytes] = [b""] * num_slots
        self._pins = array("i", bytes(4 * num_slots))
        self._filling: set[Slot] = set()
        self._children: dict[BlockHash, set[BlockHash]] = {}
        self._spare: dict[BlockHash, None] = {}
        self._clock = 0  # Ticks once per block kept.
        # Guards pins and kept blocks.
        self._lock = threading.RLock()

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
        """The slots of the longest prefix of ``hashes`` that is kept and filled. Pins nothing."""
        slots = []
        for block_hash in hashes:
            slot = self._slot_of.get(block_hash)
            if slot is None or slot in self._filling:
                break
            slots.append(slot)
        return slots

    def parent(self, block_hash: BlockHash) -> BlockHash | None:
        """The name of a kept block's parent."""
        named = self._name_of[self._slot_of[block_hash]]
        assert named is not None
        return named[1]

    def named(self) -> list[tuple[BlockHash, BlockHash | None]]:
        """All kept blocks with the names of their parents, in no order."""
        return [named for named in self._name_of if named is not None]

    def num_hits(self, slot: Slot) -> int:
        """How often requests have found the kept block, in the KV cache or in host memory."""
        return self._policy.num_hits(slot)

    def take(self, num_slots: int) -> list[Slot]:
        """Takes at most ``num_slots`` free slots, which are in use until `give_back`."""
        return [self._free.pop() for _ in range(min(num_slots, len(self._free)))]

    def give_back(self, slots: Iterable[Slot]) -> None:
        self._free.extend(slots)

    def keep(
        self, block_hash: BlockHash, parent: BlockHash | None, *, num_hits: int
    ) -> Slot | None:
        """Returns a pinned slot for a block that the KV cache evicts. The caller must fill it and
        call `filled`. ``None`` if there is no room for the block, or it is kept already."""
        with self._lock:
            slot = self._slot_of.get(block_hash)
            if slot is not None:
                self._spare.pop(block_hash, None)
                self._withdraw(slot)
                self._release(slot, num_hits)
                self._offer(slot)
                return None
            has_room = self.num_kept < self.max_kept or self._evict()
            if not (has_room and self._free):
                self._drop_behind(block_hash)
                return None
            slot = self._free.pop()
            self._clock += 1
            self._slot_of[block_hash] = slot
            self._name_of[slot] = block_hash, parent
            self._pins[slot] = 1
            self._filling.add(slot)
            if parent is not None:
                self._children.setdefault(parent, set()).add(block_hash)
            self._release(slot, num_hits)
            self._log.stored([block_hash], tier=HOST_TIER)
            return slot

    def filled(self, slot: Slot, checksum: bytes) -> None:
        """Called when the block is in the slot that `keep` returned, with its checksum. The slot
        stays pinned."""
        with self._lock:
            self._filling.discard(slot)
            self._checksums[slot] = checksum

    def loaded(self, slots: Iterable[Slot]) -> None:
        """Called when the KV cache has these blocks again: they are now evicted first."""
        with self._lock:
            for slot in slots:
                named = self._name_of[slot]
                assert named is not None
                self._withdraw(slot)
                self._policy.hit(slot)
                self._policy.held(slot, now=self._clock)
                self._spare[named[0]] = None

    def checksum(self, slot: Slot) -> bytes:
        """Checksum of the bytes of a kept block that is filled."""
        return self._checksums[slot]

    def pin(self, slot: Slot) -> None:
        """Protects a kept block, whose slot a step or thread uses, from eviction until `unpin`."""
        with self._lock:
            self._pins[slot] += 1
            self._withdraw(slot)

    def pin_all(
        self, hashes: Sequence[BlockHash]
    ) -> tuple[BlockHash | None, list[tuple[Slot, bytes]]] | None:
        """Pins the blocks of a chain if all are kept. Returns the name of the first one's parent,
        and each one's slot and checksum. Can be called from any thread."""
        with self._lock:
            slots = self.match(hashes)
            if len(slots) < len(hashes):
                return None
            for slot in slots:
                self.pin(slot)
            return self.parent(hashes[0]), [(slot, self._checksums[slot]) for slot in slots]

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            self._pins[slot] -= 1
            assert self._pins[slot] >= 0, f"slot {slot} was unpinned too often"
            if not self._pins[slot]:
                if self._name_of[slot] is None:
                    self._free.append(slot)  # The block was dropped while pinned.
                else:
                    self._offer(slot)

    def drop(self, block_hash: BlockHash) -> None:
        """Forgets a kept block and its kept descendants."""
        with self._lock:
            self._drop_behind(block_hash)
            self._forget(self._slot_of[block_hash])

    def reset(self) -> None:
        """Forgets all kept blocks."""
        with self._lock:
            for slot in list(self._slot_of.values()):
                self._forget(slot)

    def _drop_behind(self, block_hash: BlockHash) -> None:
        """Forgets the kept descendants of a block that is in no tier any more."""
        found = list(self._children.get(block_hash, ()))
        for each in found:
            found += self._children.get(each, ())
        for each in reversed(found):
            self._forget(self._slot_of[each])

    def _release(self, slot: Slot, num_hits: int) -> None:
        """Records that the KV cache has evicted the kept block, which has ``num_hits`` hits."""
        named = self._name_of[slot]
        assert named is not None
        self._policy.stored(slot, named[0], position=0, now=self._clock, num_hits=num_hits)
        self._policy.released(slot, now=self._clock)

    def _offer(self, slot: Slot) -> None:
        """Lets the kept block be evicted if it is the end of its chain, unpinned and no copy."""
        named = self._name_of[slot]
        assert named is not None
        is_last = named[0] not in self._children
        if is_last and not self._pins[slot] and named[0] not in self._spare:
            self._policy.offer(slot, now=self._clock)
            self._num_offered += not self._is_offered[slot]
            self._is_offered[slot] = 1

    def _withdraw(self, slot: Slot) -> None:
        if self._is_offered[slot]:
            self._policy.withdraw(slot)
            self._is_offered[slot] = 0
            self._num_offered -= 1

    def _evict(self) -> bool:
        """Evicts one kept block. Returns whether it could."""
        for block_hash in self._spare:
            slot = self._slot_of[block_hash]
            if not self._pins[slot]:
                self._forget(slot)
                return True
        if not self._num_offered:
            return False
        slot = Slot(self._policy.evict(now=self._clock))
        self._is_offered[slot] = 0
        self._num_offered -= 1
        self._forget(slot)
        return True

    def _forget(self, slot: Slot) -> None:
        named = self._name_of[slot]
        assert named is not None
        block_hash, parent = named
        self._withdraw(slot)
        del self._slot_of[block_hash]
        self._name_of[slot] = None
        self._spare.pop(block_hash, None)
        if parent is not None:
            self._children[parent].discard(block_hash)
            if not self._children[parent]:
                del self._children[parent]
                before = self._slot_of.get(parent)
                if before is not None:
                    self._offer(before)
        self._log.removed([block_hash], tier=HOST_TIER)
        if not self._pins[slot]:
            self._free.append(slot)
