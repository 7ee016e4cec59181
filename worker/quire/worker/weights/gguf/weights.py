"""Decodes the tensors of a GGUF file on demand, in pieces of some rows, so that little memory is
needed besides the result. The package ``gguf`` decodes the values."""

import mmap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from quire.worker.weights.checkpoint import TensorInfo
from quire.worker.weights.gguf.container import mapped
from quire.worker.weights.gguf.names import PlacedTensor

_PIECE = 1 << 14
"""Bytes decoded at once. PyTorch copies so few values in one thread. Larger pieces wait for its
other threads, which takes twice as long on a busy machine."""


class GgufFile(AbstractContextManager["GgufFile"]):
    """One file's tensors, with the interface of ``safetensors.safe_open``. Values are bfloat16 if
    ``dtype`` is, else float32."""

    def __init__(self, file: Path, tensors: Mapping[str, TensorInfo], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self._data = mapped(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Does not unmap the file: a traceback or a caller may still hold a view of it."""

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> "_Slice":
        tensor = self._tensors[name]
        assert isinstance(tensor, PlacedTensor)
        return _Slice(tensor, self._data, self._dtype)


class _Slice:
    """A tensor that can be indexed by rows and columns."""

    def __init__(self, tensor: PlacedTensor, data: mmap.mmap, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._data = data
        self._dtype = dtype

    def __getitem__(self, bounds: tuple[slice, ...]) -> Tensor:
        shape = self._tensor.shape
        if len(shape) == 1:
            whole = self._decoded((1, *shape), ())[0]
            return whole[_places(self._tensor, np.arange(len(whole)))][bounds]
        return self._decoded(shape, bounds)

    def _decoded(self, shape: tuple[int, ...], bounds: tuple[slice, ...]) -> Tensor:
        stored = self._tensor.stored
        decode, block, block_bytes = _decoder(self._tensor)
        (first, last), (left, right) = (
            each.indices(size)[:2]
            for each, size in zip((*bounds, slice(None), slice(None)), shape, strict=False)
        )
        left_block, right_block = left // block, -(-right // block)
        num_bytes = shape[0] * shape[1] // block * block_bytes
        offset = stored.offset + self._tensor.expert * num_bytes
        bytes_RB = np.frombuffer(self._data, np.uint8, num_bytes, offset).reshape(
            shape[0], shape[1] // block * block_bytes
        )[:, left_block * block_bytes : right_block * block_bytes]
        dtypes = {"values": self._dtype, "codes": torch.uint8, "scales": torch.float32}
        out_RC = torch.empty(last - first, right - left, dtype=dtypes[self._tensor.part])
        step = max(1, _PIECE // max(1, bytes_RB.shape[1]))
        for start in range(first, last, step):
            rows_R = np.arange(start, min(start + step, last))
            if len(self._tensor.shape) > 1:
                rows_R = _places(self._tensor, rows_R)
            with np.errstate(all="ignore"):  # The loader checks that values are finite.
                values_RC = decode(np.ascontiguousarray(bytes_RB[rows_R]))
            values_RC = values_RC[:, left - left_block * block :][:, : right - left]
            out_RC[start - first :][: len(values_RC)] = torch.from_numpy(values_RC)
        return out_RC


def _decoder(tensor: PlacedTensor) -> tuple[Callable[[Any], Any], int, int]:
    """A decoder from bytes ``[R, B]`` to values ``[R, C]``; columns per block; bytes per block."""
    kind = GGMLQuantizationType(tensor.stored.type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    match tensor.part:
        case "codes":
            return _codes, block, block_bytes
        case "scales":
            return _scales, 1, block_bytes
    if tensor.offset:
        return lambda bytes_RB: dequantize(bytes_RB, kind) + tensor.offset, block, block_bytes
    return lambda bytes_RB: dequantize(bytes_RB, kind), block, block_bytes


def _codes(bytes_RB: Any) -> Any:
    """The codes of Q4_0 blocks: after a scale of 2 bytes, 16 codes in the low halves of the bytes,
    then 16 in the high halves."""
    halves_RGH = bytes_RB.reshape(len(bytes_RB), -1, 18)[..., 2:]
    return np.concatenate([halves_RGH & 15, halves_RGH >> 4], axis=-1).reshape(len(bytes_RB), -1)


def _scales(bytes_RB: Any) -> Any:
    scale_RG2 = np.ascontiguousarray(bytes_RB.reshape(len(bytes_RB), -1, 18)[..., :2])
    return scale_RG2.view(np.float16)[..., 0].astype(np.float32)


def _places(tensor: PlacedTensor, rows_R: Any) -> Any:
    """The rows of the file in which the rows ``rows_R`` of a safetensors checkpoint are stored."""
    if not tensor.interleaved_heads:
        return rows_R
    size = tensor.shape[0] // tensor.interleaved_heads
    head_R, row_R = np.divmod(rows_R, size)
    half_R, pair_R = np.divmod(row_R, size // 2)
    return head_R * size + 2 * pair_R + half_R
