"""Host memory for blocks outside the KV cache: one array that the engine's process and all ranks of
its node map.

A page uses memory once it is touched, and the first touch is ten times as slow as later ones. So
the part that transfers use is touched at the start, and a thread then touches the rest, so that no
step waits for that.
"""

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress

import numpy as np

from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.request.config import STAGING_BYTES, EngineConfig

# X blocks outside the cache   C bytes of one of them

MIN_SLOTS = 32
"""Least number of slots, if there is host memory at all."""
_MADV_POPULATE_WRITE = 23
"""Provides pages without changing them (Linux 5.14); Python's mmap has no name for it."""
_TOUCHED_BYTES = 2 << 20


def num_host_blocks(config: EngineConfig, format: KvFormat) -> int:
    """Number of slots of host memory, each for one block; 0 if ``config`` needs none."""
    if not config.host_kv_bytes:
        return 0
    return max(MIN_SLOTS, config.host_kv_bytes // format.block_bytes)


def host_bytes(format: KvFormat, *, num_slots: int) -> int:
    """Bytes of the memory that `map_host_blocks` maps."""
    return _whole_pages(num_slots * format.block_bytes)


def map_host_blocks(
    format: KvFormat, *, num_slots: int, fd: int | None = None, offset: int = 0
) -> Bytes | None:
    """Maps the array ``[X, C]``, until nothing refers to it; ``None`` if there are no slots.

    ``fd`` is a file that has `host_bytes` from ``offset`` on, a multiple of the page size. Without
    it, the memory is private to this process. Must be called before anything is written there: the
    first `STAGING_BYTES` are overwritten. A thread touches the rest without changing it.
    """
    if not num_slots:
        return None
    size = host_bytes(format, num_slots=num_slots)
    if fd is None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(fd, size, offset=offset)
    with suppress(OSError):  # The kernel may not support huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_all = np.frombuffer(memory, np.uint8)
    bytes_all[: STAGING_BYTES : mmap.PAGESIZE] = 0
    if size > STAGING_BYTES:
        rest = threading.Thread(
            target=_touch,
            args=(weakref.ref(memory), bytes_all.ctypes.data, size),
            name="quire-kv-touch",
            daemon=True,
        )
        rest.start()
    return bytes_all[: num_slots * format.block_bytes].reshape(num_slots, format.block_bytes)


def _touch(memory: "weakref.ref[mmap.mmap]", address: int, size: int) -> None:
    """Touches all pages from `STAGING_BYTES` on, until ``memory`` is unmapped. Runs in a thread, at
    a low priority and without the GIL."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin in range(STAGING_BYTES, size, _TOUCHED_BYTES):
        mapped = memory()  # Kept for this part only.
        if mapped is None:
            return
        num_bytes = min(_TOUCHED_BYTES, size - begin)
        if advise(address + begin, num_bytes, _MADV_POPULATE_WRITE):
            return  # An older kernel; or no memory is left, which only its use may report.
        del mapped


def host_offset(shared_bytes: int) -> int:
    """The offset of host memory in a file that begins with ``shared_bytes`` other bytes."""
    return _whole_pages(shared_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
