"""LoRA adapters of the native library's programs; see `native/low_rank.h`."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native.linear import NativeLinear, PackedLinear, empty_huge
from quire.kernels.ops import AdapterLayers, LowRank, PackedAdapter
from quire.kernels.torch.low_rank import check_adapter, check_room, check_slot

# I, O a layer's inputs and outputs   R the ranks of an adapter's parts of a layer
# V vectors of outputs in the layer's panels

_NO_WEIGHTS = native_abi.LowRankWeights()
_LANES = 16
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """A layer that adapters may change, and the operations that apply them: each one's index, its
    kind, and its fields for the slots' weights and the number of ranks per token."""

    layer: NativeLinear
    fields: tuple[tuple[int, str, str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """An adapter's packed weights for a layer."""

    rank: int
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """The tensors that `LowRankWeights` points to: a, b, scales, vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Adapter(PackedAdapter):
    weights: Mapping[str, Any]
    """`LowRankWeights` by layer."""
    memory: Tensor
    """The memory that ``weights`` points to."""


class NativeAdapters:
    """A `quire.kernels.ops.AdapterSlots`, for one program."""

    def __init__(
        self,
        library: ctypes.CDLL,
        adapted: Mapping[str, AdaptedLayer],
        ops: "ctypes.Array[Any]",
        dtype: torch.dtype,
    ) -> None:
        self._library, self._adapted, self._ops, self._dtype = library, adapted, ops, dtype
        self._layers = {name: each.layer for name, each in adapted.items()}
        self.num_slots = self._max_rank = 0
        self._slots: dict[str, Any] = {}
        """`LowRankWeights` of each slot, by layer."""
        self._adapters: dict[int, _Adapter] = {}
        """Adapters by slot."""
        self.rank = 0
        """The most ranks that any adapter has had for one layer."""

    def open(self, *, num_slots: int, max_rank: int) -> None:
        check_room(num_slots=num_slots, max_rank=max_rank)
        self.num_slots, self._max_rank = num_slots, max_rank
        array = native_abi.LowRankWeights * num_slots
        self._slots = {name: array() for name in self._adapted}

    def pack(self, layers: AdapterLayers) -> PackedAdapter:
        layers = {name: parts for name, parts in layers.items() if parts}
        check_adapter(layers, self._layers, self._dtype, max_rank=self._max_rank)
        packed = {name: _pack(self._layers[name], parts) for name, parts in layers.items()}
        memory, addresses = self._together([x for each in packed.values() for x in each.tensors])
        weights = {}
        for name, each in packed.items():
            a, b, scales, vectors = (next(addresses) for _ in range(4))
            weights[name] = native_abi.LowRankWeights(
                a=a, b=b, scales=scales, vectors=vectors, rank=each.rank
            )
        return _Adapter(weights=weights, memory=memory)

    def set(self, slot: int, adapter: AdapterLayers | PackedAdapter | None) -> None:
        check_slot(slot, num_slots=self.num_slots)
        if not isinstance(adapter, PackedAdapter):
            adapter = self.pack(adapter or {})
        assert isinstance(adapter, _Adapter)
        for name, slots in self._slots.items():
            slots[slot] = adapter.weights.get(name, _NO_WEIGHTS)
        self._adapters[slot] = adapter
        for name, slots in self._slots.items():
            rank = max(each.rank for each in slots)
            self.rank = max(self.rank, rank)
            for place, kind, weights_field, rank_field in self._adapted[name].fields:
                op = getattr(self._ops[place], kind)
                setattr(op, weights_field, slots if rank else None)
                setattr(op, rank_field, rank)

    def _together(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Iterator[int]]:
        """Copies of the tensors in one piece of memory, with their offsets. Otherwise every few
        ranks would cost a look-up of a page of the usual size."""
        starts, end = [], 0
        for each in tensors:
            starts.append(end)
            end += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = empty_huge(self._library, (end,), torch.uint8)
        for start, each in zip(starts, tensors, strict=True):
            memory[start : start + each.nbytes] = each.flatten().view(torch.uint8)
        return memory, (memory.data_ptr() + start for start in starts)


def _pack(layer: NativeLinear, parts: Sequence[LowRank]) -> _Packed:
    """Packs an adapter's weights into the layout of the library.

    Raises:
        ValueError: A cannot be split into the parts of the layer's inputs.
    """
    num_out, num_in = layer.shape
    steps = 4 // layer.dtype.itemsize
    if not PackedLinear.can_pack(parts[0].a_RI, num_parts=layer.weights.splits):
        raise ValueError(
            f"an adapter of {num_in} inputs: must be a multiple of {2 * layer.weights.splits}"
        )
    # Each part's ranks are padded to whole lanes, and the total to whole vectors.
    sizes = [len(part.a_RI) + len(part.a_RI) % 2 for part in parts]
    starts = np.cumsum([0, *sizes])
    rank = -(-int(starts[-1]) // _LANES) * _LANES
    a_RI, scales_R = torch.zeros(rank, num_in, dtype=layer.dtype), torch.zeros(rank)
    b_OR = torch.zeros(num_out + 1, rank, dtype=layer.dtype)  # last row: unused lanes
    rows_VL = _rows_of(layer)
    vectors_V3 = np.zeros((len(rows_VL), 3), dtype=np.int64)
    vectors_V3[:, 1], ends_V = rank, np.zeros(len(rows_VL), dtype=np.int64)
    for part, first, size in zip(parts, starts.tolist(), sizes, strict=False):
        (part_rank, _), height = part.a_RI.shape, len(part.b_OR)
        a_RI[first : first + part_rank] = part.a_RI
        scales_R[first : first + part_rank] = part.scale
        b_OR[part.first_row : part.first_row + height, first : first + part_rank] = part.b_OR
        is_in_VL = (rows_VL >= part.first_row) & (rows_VL < part.first_row + height)
        is_in_V = is_in_VL.any(axis=1)
        vectors_V3[is_in_V, 1] = np.minimum(vectors_V3[is_in_V, 1], first)
        ends_V[is_in_V] = np.maximum(ends_V[is_in_V], first + size)
    vectors_V3[:, 2] = np.maximum(ends_V - vectors_V3[:, 1], 0)
    chunks: list[Tensor] = []
    lane = 0
    for first, count in np.unique(vectors_V3[:, 1:], axis=0).tolist():
        which = np.flatnonzero((vectors_V3[:, 1] == first) & (vectors_V3[:, 2] == count))
        if not count:
            continue
        some = b_OR[torch.from_numpy(rows_VL[which])][:, :, first : first + count]
        chunks.append(_in_lanes(some).flatten())
        vectors_V3[which, 0] = lane + np.arange(len(which)) * (count // steps)
        lane += len(which) * (count // steps)
    a = _in_lanes(a_RI.view(-1, _LANES, num_in))
    b = torch.cat(chunks) if chunks else torch.zeros(0, dtype=torch.int32)
    return _Packed(rank=rank, tensors=(a, b, scales_R, torch.from_numpy(vectors_V3)))


def _in_lanes(x_VLK: Tensor) -> Tensor:
    """Interleaves L rows to vectors with one lane per row: each lane has one step of K in float32,
    two in bfloat16."""
    return x_VLK.contiguous().view(torch.int32).transpose(1, 2).contiguous()


def _rows_of(layer: NativeLinear) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The output of each lane of a layer's panels; the number of outputs for an unused lane. As
    `source_row` in ``native/linear_store.h``."""
    num_out, _ = layer.shape
    if not layer.weights.gated:
        rows = np.arange(-(-num_out // (2 * _LANES)) * 2 * _LANES).reshape(-1, _LANES)
        return np.minimum(rows, num_out)
    half = num_out // 2
    gates = np.arange(-(-half // _LANES) * _LANES).reshape(-1, 1, _LANES)
    ups = np.where(gates < half, gates + half, num_out)
    gates = np.where(gates < half, gates, num_out)
    return np.concatenate([gates, ups], axis=1).reshape(-1, _LANES)
