"""Maps blocks to the groups that hold them, in memory that does not grow with the number of groups.

Each key points to the set of its holders, which all keys with the same holders share. So an entry
takes the same memory whether one group holds the block or a hundred do. Sets are compared by
identity. If two blocks of a chain have the same set, so do all blocks between them, because a group
evicts only ends of chains and so holds a chain without holes.

64 bits of a block's hash are enough for a key, because a wrong entry only costs recomputation and
never changes an answer. Among ten million blocks, a look-up of an unknown one errs with a
probability of 1e-12. The key's first byte, in the order of its value, is its *bucket*: the unit in
which the directory's entries for a group are compared with the blocks that the group holds.

There are two implementations of `PrefixIndex` with the same results: `native_index` in C++, and
`python_index` where there is no compiler.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Slot = int
"""A small number that identifies a tier of a group."""

Lengths = npt.NDArray[np.int32]
"""For each slot, how many leading blocks of a chain it holds."""


class PrefixIndex(Protocol):
    """Maps blocks to the slots that hold them.

    Hashes are passed as the bytes of a `quire.worker.blocks.hashing.BlockHashes`. At ``max_blocks``
    a block that no slot holds yet is refused: left out, counted, and its bucket marked.
    """

    num_slots: int
    """Slots below this number may be used."""

    @property
    def num_blocks(self) -> int:
        """Blocks that at least one slot holds."""

    @property
    def num_refused_blocks(self) -> int: ...

    @property
    def num_sets(self) -> int:
        """Distinct sets of holders. Sets that became empty but still have keys are included."""

    @property
    def num_bytes(self) -> int:
        """The memory that the index takes."""

    def admit(self, slot: Slot) -> None:
        """Makes room for slots up to this one."""

    def add(self, hashes: bytes, *, slot: Slot) -> None: ...

    def remove(self, hashes: bytes, *, slot: Slot) -> None: ...

    def clear(self, *, slot: Slot) -> None:
        """Removes all blocks from the slot. The cost is per set of holders, not per block."""

    def replace(self, hashes: bytes, *, slot: Slot, buckets: bytes) -> None:
        """Within ``buckets``, the slot now holds ``hashes`` and nothing else."""

    def num_held(self, slot: Slot) -> int: ...

    def digests(self, slot: Slot) -> tuple[bytes, bytes]:
        """For each bucket, the XOR of the slot's keys, as in `quire.worker.blocks.events.Digest`;
        and for each bucket, a byte that is not 0 if blocks of it were refused."""

    def longest_prefix(self, hashes: bytes, names: Sequence[T]) -> dict[T, int]:
        """How many leading blocks of a chain each slot holds; slots without the first are left out.

        The keys of the answer are the slots' ``names``. If a slot holds the chain with holes, the
        number is one at which it holds the last block counted and lacks the next.
        """

    def prefix_lengths(self, hashes: bytes) -> Lengths:
        """How many leading blocks of a chain each slot holds, for all slots.

        The array belongs to the index and is valid until the next call."""


def new_index(*, max_blocks: int) -> PrefixIndex:
    """The index in C++ if it is available, else the one in Python."""
    # Imported here because both import this module for its types.
    from quire.router.prefix_index.native_index import NativePrefixIndex, library
    from quire.router.prefix_index.python_index import PythonPrefixIndex

    native = library()
    if native is None:
        return PythonPrefixIndex(max_blocks=max_blocks)
    return NativePrefixIndex(native, max_blocks=max_blocks)
