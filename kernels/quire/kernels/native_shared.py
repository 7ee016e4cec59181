"""Sums and gathers among processes of one machine that map the same memory.

See ``native/shared_sum.cpp``. A sum adds the ranks as a binary tree, in float32, so its bits are
those that one rank with all the parts would get.
"""

import ctypes
import mmap
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

_SLOT_BYTES = 1 << 20
"""What one round carries of each rank; larger tensors take several."""


class _Group(Structure):
    _fields_ = (
        ("base", c_void_p),
        ("capacity", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
        ("round", c_int64),
    )


def shared_bytes(size: int) -> int:
    """Bytes that ``size`` ranks have to share."""
    return size * (64 + 2 * _SLOT_BYTES)


class SharedGroup:
    """One rank's end. All ranks must make the same calls in the same order."""

    def __init__(self, library: ctypes.CDLL, fd: int, *, rank: int, size: int) -> None:
        """``fd`` is a file of at least `shared_bytes` zeros, the same one for every rank."""
        self._sum = library.quire_shared_sum
        self._sum.argtypes = [POINTER(_Group), c_void_p, c_int64]
        self._sum.restype = None
        self._gather = library.quire_shared_gather
        self._gather.argtypes = [POINTER(_Group), c_void_p, POINTER(c_void_p), c_int64]
        self._gather.restype = None
        self._memory = mmap.mmap(fd, shared_bytes(size))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._group = _Group(base, _SLOT_BYTES, rank, size, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in ``x`` itself; formed in float32 whatever its dtype."""
        values = x.float().contiguous()
        self._sum(byref(self._group), values.data_ptr(), values.numel())
        return x if values is x else x.copy_(values)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's ``x``, of one shape and dtype, on rank 0; ``None`` elsewhere."""
        x = x.contiguous()
        size = self._group.size
        parts = [torch.empty_like(x) for _ in range(size)] if self._group.rank == 0 else []
        out = (c_void_p * size)(*(part.data_ptr() for part in parts))
        self._gather(byref(self._group), x.data_ptr(), out, x.nbytes)
        return parts or None
