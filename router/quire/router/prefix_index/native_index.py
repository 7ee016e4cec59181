"""The `quire.router.prefix_index.index.PrefixIndex` in C++: bindings of `native/holders.cpp`.

``python -m quire.router.prefix_index.native_index`` compiles it ahead of the first use.
"""

import ctypes
import functools
import logging
import weakref
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from quire import native_build, native_header
from quire.router.prefix_index.index import Lengths, Slot, T
from quire.worker.blocks.events import NUM_BUCKETS
from quire.worker.blocks.hashing import HASH_BYTES

_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O3", "-std=c++17", "-fPIC")

_MAX_SLOTS = 1 << 24
"""More than any cluster needs. Each admitted slot takes 2 KiB of memory."""


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The compiled library, or ``None`` if there is no compiler or it is disabled."""
    return native_build.load_or_do_without(
        _load, without="the block directory runs in Python, several times slower"
    )


def _load() -> ctypes.PyDLL:
    # PyDLL keeps the GIL: releasing and taking it again costs more than a look-up.
    loaded = ctypes.PyDLL(str(build()))
    _check_sizes(loaded)
    for source in _SOURCES.glob("*.cpp"):
        native_header.read(source).declare(loaded)
    return loaded


def build() -> Path:
    """See `quire.native_build.build`."""
    return native_build.build("directory", sources=_SOURCES, flags=_FLAGS)


def _check_sizes(library: ctypes.PyDLL) -> None:
    """Checks the sizes of the buffers that the library reads hashes from and writes digests to.

    Raises:
        RuntimeError: The library was compiled with other sizes.
    """
    sizes = {"hash_bytes": HASH_BYTES, "num_digests": NUM_BUCKETS}
    for name, here in sizes.items():
        there = c_uint64.in_dll(library, f"quire_holders_{name}").value
        if there != here:
            raise RuntimeError(f"{name} is {there} in the native directory, {here} here")


class NativePrefixIndex:
    """The `quire.router.prefix_index.index.PrefixIndex` in C++."""

    def __init__(self, library: ctypes.PyDLL, *, max_blocks: int) -> None:
        self.num_slots = 0
        self._library = library
        self._look_up = library.quire_holders_look_up
        self._index = c_void_p(library.quire_holders_new(max_blocks))
        weakref.finalize(self, library.quire_holders_delete, self._index)
        self._resize(0)

    @property
    def num_blocks(self) -> int:
        return int(self._library.quire_holders_num_blocks(self._index))

    @property
    def num_refused_blocks(self) -> int:
        return int(self._library.quire_holders_num_refused(self._index))

    @property
    def num_sets(self) -> int:
        return int(self._library.quire_holders_num_sets(self._index))

    @property
    def num_bytes(self) -> int:
        return int(self._library.quire_holders_num_bytes(self._index))

    def admit(self, slot: Slot) -> None:
        if not 0 <= slot < _MAX_SLOTS:
            raise IndexError(f"slot {slot}: must be below {_MAX_SLOTS}")
        if slot >= self.num_slots:
            self._library.quire_holders_admit(self._index, slot)
            self._resize(slot + 1)

    def add(self, hashes: bytes, *, slot: Slot) -> None:
        self._check(slot)
        self._library.quire_holders_add(self._index, slot, hashes, len(hashes) // HASH_BYTES)

    def remove(self, hashes: bytes, *, slot: Slot) -> None:
        self._check(slot)
        self._library.quire_holders_remove(self._index, slot, hashes, len(hashes) // HASH_BYTES)

    def clear(self, *, slot: Slot) -> None:
        self._check(slot)
        self._library.quire_holders_clear(self._index, slot)

    def replace(self, hashes: bytes, *, slot: Slot, buckets: bytes) -> None:
        self._check(slot)
        self._library.quire_holders_replace(
            self._index, slot, buckets, len(buckets), hashes, len(hashes) // HASH_BYTES
        )

    def num_held(self, slot: Slot) -> int:
        self._check(slot)
        return int(self._library.quire_holders_num_held(self._index, slot))

    def digests(self, slot: Slot) -> tuple[bytes, bytes]:
        self._check(slot)
        digests = ctypes.create_string_buffer(8 * NUM_BUCKETS)
        refused = ctypes.create_string_buffer(NUM_BUCKETS)
        self._library.quire_holders_digests(self._index, slot, digests, refused)
        return digests.raw, refused.raw

    def longest_prefix(self, hashes: bytes, names: Sequence[T]) -> dict[T, int]:
        num_found = self._look_up(
            self._index, hashes, len(hashes) // HASH_BYTES, self._lengths_at, self._found_at
        )
        lengths = self._lengths
        return {names[slot]: lengths[slot] for slot in self._found[:num_found]}

    def prefix_lengths(self, hashes: bytes) -> Lengths:
        self._look_up(
            self._index, hashes, len(hashes) // HASH_BYTES, self._lengths_at, self._found_at
        )
        return self._lengths_array

    def _resize(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._lengths = (ctypes.c_int32 * num_slots)()
        self._found = (c_uint32 * num_slots)()
        self._lengths_at = c_void_p(ctypes.addressof(self._lengths))
        self._found_at = c_void_p(ctypes.addressof(self._found))
        self._lengths_array: Lengths = np.frombuffer(memoryview(self._lengths), dtype=np.int32)

    def _check(self, slot: Slot) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot}: must be one of {self.num_slots} that were admitted")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    library()
