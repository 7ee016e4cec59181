"""All-reduce and gather over shared memory, between processes of one machine.

See ``native/shared_sum.cpp``. A sum adds the ranks as a binary tree, in float32, so it has the same
bits as one rank with all the parts.
"""

import ctypes
import mmap
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native.check import pointer

_SLOT_BYTES = 1 << 20
"""Bytes per rank and round; larger tensors take several rounds."""


def shared_bytes(size: int) -> int:
    """Bytes of shared memory that ``size`` ranks need."""
    return size * (64 + 2 * _SLOT_BYTES)


class SharedGroup:
    """One rank's communicator. All ranks must make the same calls in the same order."""

    def __init__(self, library: ctypes.CDLL, fd: int, *, rank: int, size: int) -> None:
        """``fd`` is a file of at least `shared_bytes` zeros, the same one for every rank.

        Raises:
            ValueError: The file is too small, or ``rank`` is not below ``size``.
        """
        if not 0 <= rank < size:
            raise ValueError(f"{rank=}: must be below {size}")
        self._sum, self._gather = library.quire_shared_sum, library.quire_shared_gather
        self._memory = mmap.mmap(fd, shared_bytes(size))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._group = native_abi.SharedGroup(base, _SLOT_BYTES, rank, size, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums ``x`` over all ranks, in place; the sum is computed in float32."""
        values = x.float().contiguous()
        at = pointer("what is summed", values, torch.float32, *x.shape)
        self._sum(byref(self._group), at, values.numel())
        return x if values is x else x.copy_(values)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's ``x``, of the same shape and dtype, on rank 0; ``None`` elsewhere."""
        x = x.contiguous()
        at = pointer("what is gathered", x, x.dtype, *x.shape)
        size = self._group.size
        parts = [torch.empty_like(x) for _ in range(size)] if self._group.rank == 0 else []
        out = (c_void_p * size)(*(part.data_ptr() for part in parts))
        self._gather(byref(self._group), at, out, x.nbytes)
        return parts or None
