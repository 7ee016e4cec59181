"""Which groups hold which blocks, in memory that does not grow with the number of groups.

Each key points to the set of its holders, a bitmask over groups that all keys with the same
holders share: an entry takes the same memory whether one group holds the block or a hundred do.

60 bits of a block's hash are enough for a key, for nothing here decides what a request is served:
a wrong hint costs recomputation. They are the bits of two digits of a Python int, which take 32
bytes where the whole hash takes 80; among ten million blocks a lookup of a foreign one errs with
a probability of 1e-11.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from quire.worker.hashing import BlockHash

_KEY_BITS = 60
_FIRST_CHUNK_BLOCKS = 16


class _Holders:
    """The groups that hold the blocks pointing here; ``mask`` 0 is nobody any longer."""

    __slots__ = ("mask", "num_keys")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.num_keys = 0


class HolderIndex:
    """From blocks to the groups that hold them, a group being a single bit of a mask.

    At ``max_blocks`` a block that nobody holds yet is left out and counted.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._index: dict[int, _Holders] = {}
        self._holders: set[_Holders] = set()
        self._by_mask: dict[int, _Holders] = {}
        self._num_ownerless = 0
        self.num_refused_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that at least one group holds."""
        return len(self._index) - self._num_ownerless

    def add(self, hashes: Sequence[BlockHash], *, bit: int) -> int:
        """Makes the group of ``bit`` a holder of ``hashes``; returns of how many more."""
        num_added = 0
        for key in _keys(hashes):
            old = self._index.get(key)
            if old is None:
                if len(self._index) >= self._max_blocks and not self._sweep():
                    self.num_refused_blocks += 1
                    continue
                self._point(key, None, bit)
            elif old.mask & bit:
                continue
            else:
                self._point(key, old, old.mask | bit)
            num_added += 1
        return num_added

    def remove(self, hashes: Sequence[BlockHash], *, bit: int) -> int:
        """The group of ``bit`` holds none of ``hashes`` any longer; returns how many it did."""
        num_removed = 0
        for key in _keys(hashes):
            old = self._index.get(key)
            if old is None or not old.mask & bit:
                continue
            self._point(key, old, old.mask & ~bit)
            num_removed += 1
        return num_removed

    def clear(self, *, bit: int) -> None:
        """Takes the group of ``bit`` out of every set of holders.

        That costs a step per distinct set, not per block: a gateway must not stop to walk a
        million blocks just when a group died. Blocks left without an owner go when they are half
        of all, which spreads the walk over at least as many blocks stored.
        """
        self._by_mask = {}
        for holders in self._holders:
            if holders.mask & bit:
                holders.mask &= ~bit
                if not holders.mask:
                    self._num_ownerless += holders.num_keys
            # Two sets may have become equal; one of them then takes no more keys.
            if holders.mask:
                self._by_mask[holders.mask] = holders
        if 2 * self._num_ownerless > len(self._index):
            self._sweep()

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[int, int]:
        """How many of ``hashes`` each group's bit holds from the first on, without a hole.

        The walk ends with the last holder, so that it costs what the longest match does. No
        jumps: refused blocks can leave holes, which only a walk is sure to see.
        """
        lengths: dict[int, int] = {}
        alive = -1
        last: _Holders | None = None
        for position, holders in enumerate(self._holders_of(hashes)):
            if holders is last and position:
                continue
            still = alive & holders.mask if holders else 0
            if position:
                _record(lengths, alive & ~still, position)
            alive, last = still, holders
            if not alive:
                break
        else:
            if hashes:
                _record(lengths, alive, len(hashes))
        return lengths

    def _holders_of(self, hashes: Sequence[BlockHash]) -> Iterator[_Holders | None]:
        """In chunks that grow: a prompt that misses at once does not pay for its whole length."""
        start, num_hashes = 0, _FIRST_CHUNK_BLOCKS
        while start < len(hashes):
            yield from map(self._index.get, _keys(hashes[start : start + num_hashes]))
            start, num_hashes = start + num_hashes, 2 * num_hashes

    def _point(self, key: int, old: _Holders | None, mask: int) -> None:
        """Makes the holders of ``key`` those of ``mask``, which differs from its old one."""
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
        """Deletes the blocks without an owner; tells whether there were any."""
        if not self._num_ownerless:
            return False
        self._index = {key: holders for key, holders in self._index.items() if holders.mask}
        self._holders = {holders for holders in self._holders if holders.mask}
        self._num_ownerless = 0
        return True


def _keys(hashes: Sequence[BlockHash]) -> list[int]:
    words = np.frombuffer(b"".join(hashes), dtype="<u8")[::4]
    keys: list[int] = (words & ((1 << _KEY_BITS) - 1)).tolist()
    return keys


def _record(lengths: dict[int, int], mask: int, length: int) -> None:
    """Notes ``length`` for each single bit of ``mask``."""
    while mask:
        bit = mask & -mask
        lengths[bit] = length
        mask ^= bit
