"""Copies the arrays of a step to tensors on the device, in one asynchronous transfer."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

ALIGNMENT = 16
"""Bytes. Each array begins at a multiple, so that kernels can use the widest loads."""


def stage(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, in the same order.

    On a GPU they are copied together through pinned memory. PyTorch does not reuse that memory
    before the copy has ended, so the arrays may change at once. On a CPU the tensors share the
    memory of arrays that are writable.
    """
    if device.type != "cuda":
        # torch warns about read-only arrays, such as slices of a frozen buffer.
        return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    host = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, host)
    return list(unpack(arrays, host.to(device, non_blocking=True)))


def stage_fields(arrays: Any, device: torch.device) -> dict[str, Tensor]:
    """The arrays of a dataclass as tensors on the device, by field name."""
    names = [each.name for each in fields(arrays)]
    return dict(zip(names, stage([getattr(arrays, name) for name in names], device), strict=True))


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Size in bytes of the buffer that `pack` needs, each array rounded up to `ALIGNMENT`."""
    return sum(_padded(array.nbytes) for array in arrays)


def pack(arrays: Sequence[Array], buffer: Tensor) -> None:
    """Writes the arrays into a buffer of bytes on the host, one after the other."""
    for array, piece in zip(arrays, unpack(arrays, buffer), strict=True):
        np.copyto(piece.numpy(), array)


def unpack(arrays: Sequence[Array], buffer: Tensor) -> Iterator[Tensor]:
    """Views of a packed buffer with the arrays' types and shapes."""
    start = 0
    for array in arrays:
        piece = buffer[start : start + array.nbytes]
        yield piece.view(_TORCH_TYPES[array.dtype.name]).view(array.shape)
        start += _padded(array.nbytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_TORCH_TYPES = {
    name: getattr(torch, name) for name in ("int32", "int64", "float32", "float64", "uint8")
}
