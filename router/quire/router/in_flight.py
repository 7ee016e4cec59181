"""Counts the blocks of prompts that groups are computing now (*in-flight prefixes*).

A group will have these blocks before a request routed there later runs, so routing counts them as
cached. There are two implementations with the same results: C++, and Python where there is no
compiler. A group is identified by a number that is never reused, even if its name is.
"""

import ctypes
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Protocol

from quire.router.prefix_index import native_index as native_holders
from quire.worker.blocks.events import keys_of
from quire.worker.blocks.hashing import HASH_BYTES


class PrefixCounts(Protocol):
    """How many requests in flight have each block, per group. Hashes are the bytes of a
    `BlockHashes`."""

    def add(self, hashes: bytes, *, group: int) -> None: ...

    def remove(self, hashes: bytes, *, group: int) -> None:
        """Reverts an `add` of the same hashes to the same group."""

    def extend(self, hashes: bytes, groups: Sequence[int], lengths: Sequence[int]) -> "array[int]":
        """The prompt's prefix length in blocks at each of ``groups``: its cached ``lengths``, plus
        the in-flight blocks that follow. An ``array("q")``; ``lengths`` copies fastest as one."""


def new_counts() -> PrefixCounts:
    """The compiled implementation if it is available, else the one in Python."""
    library = native_holders.library()
    return PythonCounts() if library is None else NativeCounts(library)


class NativeCounts:
    """The implementation in C++, `native/prefix_counts.cpp`."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._add = library.quire_prefix_counts_add
        self._remove = library.quire_prefix_counts_remove
        self._extend = library.quire_prefix_counts_extend
        self._counts = c_void_p(library.quire_prefix_counts_new())
        weakref.finalize(self, library.quire_prefix_counts_delete, self._counts)

    def add(self, hashes: bytes, *, group: int) -> None:
        self._add(self._counts, group, hashes, len(hashes) // HASH_BYTES)

    def remove(self, hashes: bytes, *, group: int) -> None:
        self._remove(self._counts, group, hashes, len(hashes) // HASH_BYTES)

    def extend(self, hashes: bytes, groups: Sequence[int], lengths: Sequence[int]) -> "array[int]":
        numbers, ends = array("Q", groups), array("q", lengths)
        if len(numbers) != len(ends):
            raise ValueError(f"{len(numbers)} groups, {len(ends)} lengths: one for each")
        self._extend(
            self._counts,
            numbers.buffer_info()[0],
            ends.buffer_info()[0],
            len(ends),
            hashes,
            len(hashes) // HASH_BYTES,
        )
        return ends


class PythonCounts:
    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}

    def add(self, hashes: bytes, *, group: int) -> None:
        if hashes:
            self._counts.setdefault(group, Counter()).update(keys_of(hashes))

    def remove(self, hashes: bytes, *, group: int) -> None:
        if not hashes:
            return
        counts = self._counts[group]
        for key in keys_of(hashes):
            if counts[key] == 1:
                del counts[key]
            else:
                counts[key] -= 1
        if not counts:
            del self._counts[group]

    def extend(self, hashes: bytes, groups: Sequence[int], lengths: Sequence[int]) -> "array[int]":
        ends = array("q", lengths)
        if self._counts:
            keys = memoryview(hashes).cast("Q")[::4]
            for position, group in enumerate(groups):
                if group in self._counts:
                    ends[position] = self._end(keys, group, ends[position])
        return ends

    def _end(self, keys: "memoryview[int]", group: int, length: int) -> int:
        counts = self._counts[group]
        while length < len(keys) and keys[length] in counts:
            length += 1
        return length
