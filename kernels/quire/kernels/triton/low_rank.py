"""Triton LoRA: applies adapters to linear layers on a GPU in two launches per layer, without
waiting for the device.

Tokens are sorted by slot once a step, stably. A program computes a tile of one adapter's tokens and
ranks, or of its tokens and the layer's outputs. The slots' memory is allocated once, so that a CUDA
graph finds a later adapter at the same address. A token's sums run over the inputs, and then over
the ranks, in steps of a fixed length in a fixed tile shape. So its bits depend neither on the other
tokens nor on the slot.

Traffic: A and B of each adapter in the batch, once for each `LOW_RANK_TOKENS` of its tokens, and
its tokens' products once more. Tokens without an adapter are not touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.ops import AdapterLayers, LinearLayer, LowRank, PackedAdapter, Program
from quire.kernels.torch.low_rank import (
    adapted_layers,
    check_adapter,
    check_room,
    check_slot,
    model_type,
)
from quire.kernels.triton.experts import SortedPairs, find_rows
from quire.kernels.triton.launch import LOW_RANK_STEP, LOW_RANK_TILE, low_rank_options

# T tokens   I, O a layer's inputs and outputs   S slots   P parts of an adapter's layer
# R their ranks   N values of B

MAX_PARTS = 4
"""The most updates of an adapter to one layer: Q, K and V have one each."""
_FIELDS = 5
"""A part's first output, number of outputs, first rank, number of ranks, and where its B begins."""
_USUAL_PARTS = {"qkv": 3, "gate_up": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSlots:
    """One layer's adapters, at fixed addresses."""

    a_SRI: Tensor
    b_SN: Tensor
    """The parts' B one after the other: each output with its ranks, padded to whole steps."""
    ranks_S: Tensor
    """int32: the ranks in use; ranks that pad a part to whole steps are zeros."""
    parts_SPF: Tensor
    """int32; see `_FIELDS`."""
    scales_SP: Tensor

    @classmethod
    def of(
        cls, name: str, layer: LinearLayer, like: Tensor, *, num_slots: int, max_rank: int
    ) -> "LayerSlots":
        num_out, num_in = layer.shape
        max_rank = _whole_steps(max_rank)
        ranks = _USUAL_PARTS.get(name.rpartition(".")[2], 1) * max_rank
        return cls(
            a_SRI=like.new_zeros(num_slots, ranks, num_in),
            b_SN=like.new_zeros(num_slots, num_out * max_rank),
            ranks_S=like.new_zeros(num_slots, dtype=torch.int32),
            parts_SPF=like.new_zeros(num_slots, MAX_PARTS, _FIELDS, dtype=torch.int32),
            scales_SP=like.new_zeros(num_slots, MAX_PARTS, dtype=torch.float32),
        )

    def check(self, name: str, parts: Sequence[LowRank]) -> None:
        """Checks that an adapter's parts fit a slot.

        Raises:
            ValueError: There is no room for ``parts``.
        """
        ranks = sum(_whole_steps(len(part.a_RI)) for part in parts)
        values = sum(_whole_steps(len(part.a_RI)) * len(part.b_OR) for part in parts)
        found = (len(parts), ranks, values)
        most = (MAX_PARTS, self.a_SRI.shape[1], self.b_SN.shape[1])
        if any(x > y for x, y in zip(found, most, strict=True)):
            raise ValueError(
                f"{name}: an adapter of (parts, ranks, values of B) {found}; a GPU has room for "
                f"{most}"
            )

    def set(self, slot: int, parts: Sequence[LowRank]) -> None:
        fields, scales = torch.zeros(MAX_PARTS, _FIELDS, dtype=torch.int32), torch.zeros(MAX_PARTS)
        first = start = 0
        for number, part in enumerate(parts):
            (rank, _), height = part.a_RI.shape, len(part.b_OR)
            whole = _whole_steps(rank)
            self.a_SRI[slot, first : first + rank] = part.a_RI
            self.a_SRI[slot, first + rank : first + whole] = 0
            b_OR = self.b_SN[slot, start : start + height * whole].view(height, whole)
            b_OR[:, :rank] = part.b_OR
            b_OR[:, rank:] = 0
            fields[number] = torch.tensor([part.first_row, height, first, whole, start])
            scales[number] = part.scale
            first, start = first + whole, start + height * whole
        self.parts_SPF[slot], self.scales_SP[slot] = fields, scales
        self.ranks_S[slot] = first


@dataclass(frozen=True, slots=True)
class _Adapter(PackedAdapter):
    layers: AdapterLayers


class TritonLowRank:
    """`quire.kernels.torch.low_rank.LowRankLayers` for CUDA devices."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._adapted = adapted_layers(program)
        self._max_rank = self._num_slots = 0
        self._layers: dict[str, LayerSlots] = {}

    def open(self, *, num_slots: int, max_rank: int) -> None:
        check_room(num_slots=num_slots, max_rank=max_rank)
        self._num_slots, self._max_rank = num_slots, max_rank
        like = model_type(self._program)
        self._layers = {
            name: LayerSlots.of(name, layer, like, num_slots=num_slots, max_rank=max_rank)
            for name, layer in self._adapted.items()
        }

    def pack(self, layers: AdapterLayers) -> PackedAdapter:
        dtype = model_type(self._program).dtype
        check_adapter(layers, self._adapted, dtype, max_rank=self._max_rank)
        for name, parts in layers.items():
            self._layers[name].check(name, parts)
        return _Adapter(layers)

    def set(self, slot: int, adapter: AdapterLayers | PackedAdapter | None) -> None:
        check_slot(slot, num_slots=self._num_slots)
        if not isinstance(adapter, PackedAdapter):
            adapter = self.pack(adapter or {})
        assert isinstance(adapter, _Adapter)
        for name, memory in self._layers.items():
            memory.set(slot, adapter.layers.get(name, ()))

    def group(self, slots_T: Tensor) -> SortedPairs:
        return SortedPairs.of(slots_T[:, None], num_experts=self._num_slots)

    def shrink(self, name: str, x_TI: Tensor, groups: SortedPairs) -> Tensor | None:
        layer = self._layers.get(name)
        if layer is None:
            return None
        num_slots, num_ranks, num_in = layer.a_SRI.shape
        ax_TR = x_TI.new_zeros(len(x_TI), num_ranks, dtype=torch.float32)
        if not len(x_TI):
            return ax_TR
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        shrink_kernel[(_num_tiles(len(x_TI), num_slots), triton.cdiv(num_ranks, LOW_RANK_STEP))](
            x_TI,
            layer.a_SRI,
            groups.order_N,
            groups.starts_E1,
            layer.ranks_S,
            ax_TR,
            num_in,
            num_ranks,
            x_TI.stride(0),
            NUM_SLOTS=num_slots,
            SLOTS=triton.next_power_of_2(num_slots),
            BLOCK_M=LOW_RANK_TILE["BLOCK_M"],
            BLOCK_R=LOW_RANK_STEP,
            BLOCK_K=LOW_RANK_TILE["BLOCK_K"],
            **low_rank_options(x_TI.dtype),
        )
        return ax_TR

    def expand(self, name: str, product_TO: Tensor, ax_TR: Tensor, groups: SortedPairs) -> Tensor:
        """Adds to ``product`` in place, which rounds each value once more."""
        if not len(product_TO):
            return product_TO
        layer = self._layers[name]
        num_slots, num_out = len(layer.b_SN), product_TO.shape[1]
        num_columns = triton.cdiv(num_out, LOW_RANK_TILE["BLOCK_N"])
        expand_kernel[(_num_tiles(len(product_TO), num_slots), num_columns)](
            product_TO,
            ax_TR,
            layer.b_SN,
            groups.order_N,
            groups.starts_E1,
            layer.parts_SPF,
            layer.scales_SP,
            layer.b_SN.shape[1],
            product_TO.stride(0),
            ax_TR.stride(0),
            NUM_SLOTS=num_slots,
            SLOTS=triton.next_power_of_2(num_slots),
            NUM_PARTS=MAX_PARTS,
            NUM_FIELDS=_FIELDS,
            BLOCK_M=LOW_RANK_TILE["BLOCK_M"],
            BLOCK_N=LOW_RANK_TILE["BLOCK_N"],
            BLOCK_R=LOW_RANK_STEP,
            **low_rank_options(torch.float32),
        )
        return product_TO


def _whole_steps(rank: int) -> int:
    return int(triton.cdiv(rank, LOW_RANK_STEP)) * LOW_RANK_STEP


def _num_tiles(num_tokens: int, num_slots: int) -> int:
    """An upper bound, since each adapter's last tile may have few tokens."""
    return int(triton.cdiv(num_tokens, LOW_RANK_TILE["BLOCK_M"])) + min(num_slots, num_tokens)


@triton.jit
def shrink_kernel(
    x,
    a,
    order,
    starts,
    ranks,
    out,
    num_in,
    num_ranks,
    x_stride,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes A x for a tile of tokens and a step of their adapter's ranks."""
    slot, begin, end = find_rows(starts, tl.program_id(0), NUM_SLOTS, SLOTS, BLOCK_M)
    first = tl.program_id(1) * BLOCK_R
    used = tl.load(ranks + slot, mask=begin < end, other=0)
    if first < used:
        places = begin + tl.arange(0, BLOCK_M)
        is_token = places < end
        tokens = tl.load(order + places, mask=is_token, other=0).to(tl.int64)
        columns = first + tl.arange(0, BLOCK_R)
        ks = tl.arange(0, BLOCK_K)
        x_tile = x + tokens[:, None] * x_stride + ks[None, :]
        rows = slot.to(tl.int64) * num_ranks + columns
        a_tile = a + rows[None, :] * num_in + ks[:, None]
        sums = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for k in tl.range(0, num_in, BLOCK_K):
            is_in = ks < num_in - k
            xs = tl.load(x_tile + k, mask=is_token[:, None] & is_in[None, :], other=0.0)
            weights = tl.load(a_tile + k, mask=is_in[:, None], other=0.0)
            sums = tl.dot(xs, weights, sums, input_precision="ieee")
        out_tile = out + tokens[:, None] * num_ranks + columns[None, :]
        tl.store(out_tile, sums, mask=is_token[:, None])


@triton.jit
def expand_kernel(
    product,
    ax,
    b,
    order,
    starts,
    parts,
    scales,
    slot_size,
    product_stride,
    ax_stride,
    NUM_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Adds the parts of a tile's adapter that overlap its outputs, in order."""
    slot, begin, end = find_rows(starts, tl.program_id(0), NUM_SLOTS, SLOTS, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    if begin < end:
        places = begin + tl.arange(0, BLOCK_M)
        is_token = places < end
        tokens = tl.load(order + places, mask=is_token, other=0).to(tl.int64)
        columns = first_column + tl.arange(0, BLOCK_N)
        rs = tl.arange(0, BLOCK_R)
        for number in range(NUM_PARTS):
            part = slot * NUM_PARTS + number
            fields = parts + part * NUM_FIELDS
            first_row = tl.load(fields)
            end_row = first_row + tl.load(fields + 1)
            if (first_row < first_column + BLOCK_N) & (end_row > first_column):
                first_rank = tl.load(fields + 2)
                rank = tl.load(fields + 3)
                scale = tl.load(scales + part)
                is_column = (columns >= first_row) & (columns < end_row)
                ax_tile = ax + tokens[:, None] * ax_stride + first_rank + rs[None, :]
                outputs = slot.to(tl.int64) * slot_size + tl.load(fields + 4)
                b_tile = b + outputs + (columns - first_row)[None, :] * rank + rs[:, None]
                sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                for r in tl.range(0, rank, BLOCK_R):
                    ts = tl.load(ax_tile + r, mask=is_token[:, None], other=0.0).to(tl.float32)
                    weights = tl.load(b_tile + r, mask=is_column[None, :], other=0.0)
                    sums = tl.dot(ts * scale, weights.to(tl.float32), sums, input_precision="ieee")
                to = product + tokens[:, None] * product_stride + columns[None, :]
                mask = is_token[:, None] & is_column[None, :]
                before = tl.load(to, mask=mask, other=0.0).to(tl.float32)
                tl.store(to, (before + sums).to(product.dtype.element_ty), mask=mask)
