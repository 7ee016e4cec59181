"""Which groups hold which blocks, in memory that does not grow with the number of groups.

Each key points to the set of its holders, which all keys with the same holders share: an entry
takes the same memory whether one group holds the block or a hundred do. Sets are compared by
identity. If two blocks of a chain have the same set, so do all blocks between them, because a group
evicts only ends of chains and so holds a chain without holes.

64 bits of a block's hash are enough for a key, because a wrong hint only costs recomputation and
never changes an answer. Among ten million blocks, a look-up of an unknown one errs with a
probability of 1e-12. The key's first byte, in the order of its value, is its *bucket*, the unit
in which what is known of a group is compared with what the group holds.

There are two implementations of `PrefixIndex` with the same results: `native_holders`, compiled,
and `python_holders` where there is no compiler.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Slot = int
"""A small number that identifies a group."""

Lengths = npt.NDArray[np.int32]
"""For each slot, how many blocks of a chain its group holds, from the first on."""


class PrefixIndex(Protocol):
    """From blocks to the slots that hold them.

    Hashes come as the bytes of a `quire.worker.api.hashing.BlockHashes`. At ``max_blocks`` a block
    that nobody holds yet is refused: left out, counted, and its bucket noted.
    """

    num_slots: int
    """Slots that may be used are below it."""

    @property
    def num_blocks(self) -> int:
        """Blocks that at least one slot holds."""

    @property
    def num_refused_blocks(self) -> int: ...

    @property
    def num_sets(self) -> int:
        """Distinct sets of holders, those that became empty and still have keys included."""

    @property
    def num_bytes(self) -> int:
        """The memory that all this takes."""

    def admit(self, slot: Slot) -> None:
        """Makes room for slots up to this one."""

    def add(self, hashes: bytes, *, slot: Slot) -> None: ...

    def remove(self, hashes: bytes, *, slot: Slot) -> None: ...

    def clear(self, *, slot: Slot) -> None:
        """The slot holds nothing any longer. Costs a step per set of holders, not per block."""

    def replace(self, hashes: bytes, *, slot: Slot, buckets: bytes) -> None:
        """Within ``buckets``, the slot now holds ``hashes`` and nothing else."""

    def num_held(self, slot: Slot) -> int: ...

    def digests(self, slot: Slot) -> tuple[bytes, bytes]:
        """The XOR of the slot's keys for each bucket, as in `quire.worker.api.events.Digest`; and
        for each a byte that is not 0 where blocks were refused."""

    def longest_prefix(self, hashes: bytes, names: Sequence[T]) -> dict[T, int]:
        """How many of a chain's ``hashes`` each slot holds from the first on; not those of none.

        ``names`` are those of the slots in the answer.
        Where a slot holds it with holes, one of its ends: it holds the last block counted, and
        the next one not.
        """

    def prefix_lengths(self, hashes: bytes) -> Lengths:
        """The same for all slots. The array is the index's, and good until the next call."""


def new_index(*, max_blocks: int) -> PrefixIndex:
    """The compiled index where it can be had."""
    # Each imports this module for its types.
    from quire.router.prefix_index.native_index import NativePrefixIndex, library
    from quire.router.prefix_index.python_index import PythonPrefixIndex

    native = library()
    if native is None:
        return PythonPrefixIndex(max_blocks=max_blocks)
    return NativePrefixIndex(native, max_blocks=max_blocks)
