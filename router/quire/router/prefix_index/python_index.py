"""The `quire.router.prefix_index.index.PrefixIndex` in Python, for machines without a compiler.

A set of slots is an int used as a bit mask.
"""

import struct
from collections.abc import Sequence
from sys import getsizeof

import numpy as np

from quire.router.prefix_index.index import Lengths, Slot, T
from quire.worker.blocks.events import NUM_BUCKETS, bucket_of, keys_of


class _Holders:
    """A set of slots that ``num_keys`` blocks share. Bit s of ``mask`` is slot s; 0: no holder."""

    __slots__ = ("mask", "num_keys")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.num_keys = 0


class _Held:
    """The counters of one slot."""

    __slots__ = ("digests", "num_blocks", "refused")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.digests = [0] * NUM_BUCKETS
        self.refused = bytearray(NUM_BUCKETS)


_NOBODY = _Holders(0)


class PythonPrefixIndex:
    """The `quire.router.prefix_index.index.PrefixIndex` in Python."""

    def __init__(self, *, max_blocks: int) -> None:
        self.num_slots = 0
        self.num_refused_blocks = 0
        self._max_blocks = max_blocks
        self._slots: list[_Held] = []
        self._index: dict[int, _Holders] = {}
        self._holders: set[_Holders] = set()
        self._by_mask: dict[int, _Holders] = {}
        self._num_ownerless = 0

    @property
    def num_blocks(self) -> int:
        return len(self._index) - self._num_ownerless

    @property
    def num_sets(self) -> int:
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """An estimate: 36 bytes per key and 150 per set; the masks' ints are not counted."""
        num_keys = len(self._index)
        return getsizeof(self._index) + 36 * num_keys + 150 * len(self._holders)

    def admit(self, slot: Slot) -> None:
        while self.num_slots <= slot:
            self._slots.append(_Held())
            self.num_slots += 1

    def add(self, hashes: bytes, *, slot: Slot) -> None:
        self._add(keys_of(hashes), slot)

    def remove(self, hashes: bytes, *, slot: Slot) -> None:
        self._remove(keys_of(hashes), slot)

    def clear(self, *, slot: Slot) -> None:
        """Blocks without a holder are deleted only once they are half of all blocks. So a gateway
        does not stop to scan the whole index whenever a group dies.
        """
        held, self._slots[slot] = self._slots[slot], _Held()
        if not held.num_blocks:
            return
        bit = 1 << slot
        self._by_mask = {}
        for holders in self._holders:
            if holders.mask & bit:
                holders.mask &= ~bit
                if not holders.mask:
                    self._num_ownerless += holders.num_keys
            # Two sets may have become equal; only one of them is given new keys.
            if holders.mask:
                self._by_mask[holders.mask] = holders
        if 2 * self._num_ownerless > len(self._index):
            self._sweep()

    def replace(self, hashes: bytes, *, slot: Slot, buckets: bytes) -> None:
        for bucket in buckets:
            self._slots[slot].refused[bucket] = 0
        wanted = set(keys_of(hashes))
        bit, chosen = 1 << slot, frozenset(buckets)
        excess = [
            key
            for key, holders in self._index.items()
            if bucket_of(key) in chosen and holders.mask & bit and key not in wanted
        ]
        self._remove(excess, slot)
        self._add(list(wanted), slot)

    def num_held(self, slot: Slot) -> int:
        return self._slots[slot].num_blocks

    def digests(self, slot: Slot) -> tuple[bytes, bytes]:
        held = self._slots[slot]
        return struct.pack(f"<{NUM_BUCKETS}Q", *held.digests), bytes(held.refused)

    def longest_prefix(self, hashes: bytes, names: Sequence[T]) -> dict[T, int]:
        keys = memoryview(hashes).cast("Q")  # Every fourth is a key.
        num_hashes = len(keys) // 4
        if not num_hashes:
            return {}
        get = self._index.get
        first = get(keys[0])
        if first is None:
            return {}
        last = get(keys[4 * num_hashes - 4], _NOBODY)
        lengths: dict[T, int] = {}
        alive = first.mask
        # A stack of spans of blocks, the first span on top, with the holders at both ends.
        spans = [(num_hashes - 1, last, num_hashes, _NOBODY), (0, first, num_hashes - 1, last)]
        while spans:
            low, at_low, high, at_high = spans.pop()
            if not alive & at_low.mask & ~at_high.mask:
                continue
            while high - low > 1:
                middle = (low + high) >> 1
                at = get(keys[middle << 2], _NOBODY)
                if at is at_low:
                    low = middle
                elif at is at_high:
                    high = middle
                else:
                    spans.append((middle, at, high, at_high))
                    high, at_high = middle, at
            leaving = alive & at_low.mask & ~at_high.mask
            alive ^= leaving
            while leaving:
                bit = leaving & -leaving
                lengths[names[bit.bit_length() - 1]] = high
                leaving ^= bit
        return lengths

    def prefix_lengths(self, hashes: bytes) -> Lengths:
        lengths = np.zeros(self.num_slots, dtype=np.int32)
        for slot, length in self.longest_prefix(hashes, range(self.num_slots)).items():
            lengths[slot] = length
        return lengths

    def _add(self, keys: Sequence[int], slot: Slot) -> None:
        held, bit = self._slots[slot], 1 << slot
        for key in keys:
            old = self._index.get(key)
            if old is None:
                if len(self._index) >= self._max_blocks and not self._sweep():
                    self.num_refused_blocks += 1
                    held.refused[bucket_of(key)] = 1
                    continue
                self._point(key, None, bit)
            elif old.mask & bit:
                continue
            else:
                self._point(key, old, old.mask | bit)
            held.num_blocks += 1
            held.digests[bucket_of(key)] ^= key

    def _remove(self, keys: Sequence[int], slot: Slot) -> None:
        held, bit = self._slots[slot], 1 << slot
        for key in keys:
            old = self._index.get(key)
            if old is None or not old.mask & bit:
                continue
            self._point(key, old, old.mask & ~bit)
            held.num_blocks -= 1
            held.digests[bucket_of(key)] ^= key

    def _point(self, key: int, old: _Holders | None, mask: int) -> None:
        """Sets the holders of ``key`` to ``mask``, which differs from the old one's."""
        if old is not None:
            old.num_keys -= 1
            if not old.mask:
                self._num_ownerless -= 1
            if not old.num_keys:
                self._holders.discard(old)
                if self._by_mask.get(old.mask) is old:
                    del self._by_mask[old.mask]
        if not mask:
            del self._index[key]
            return
        new = self._by_mask.get(mask)
        if new is None:
            new = self._by_mask[mask] = _Holders(mask)
            self._holders.add(new)
        new.num_keys += 1
        self._index[key] = new

    def _sweep(self) -> bool:
        """Deletes the blocks without a holder; returns whether there were any."""
        if not self._num_ownerless:
            return False
        self._index = {key: holders for key, holders in self._index.items() if holders.mask}
        self._holders = {holders for holders in self._holders if holders.mask}
        self._num_ownerless = 0
        return True
