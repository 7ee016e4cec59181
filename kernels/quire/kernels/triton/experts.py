"""Triton products of mixtures of experts: all experts of all tokens in two launches, without a copy
to the host.

Tokens are sorted by expert, stably; a program computes a tile of one expert's rows and outputs. The
addresses of the experts' weights are read from a table, so that weights stay where they were
loaded. A row's sums run over the inputs in steps of a fixed length, in a fixed tile shape. So its
bits depend neither on the other rows nor on how many rows an expert has.

Traffic: the weights of every expert that has tokens, once for each 64 of its rows; with few rows
this dominates.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import EXPERTS_BLOCK, experts_options

# T tokens   k experts of a token   N pairs of these   E experts   I, O a product's inputs, outputs


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The weights of one product, of all experts."""

    weight_OIs: tuple[Tensor, ...]
    bias_Os: tuple[Tensor, ...] | None
    table_2E: Tensor
    """Addresses of the weights, then of the biases; int64."""

    @classmethod
    def of(cls, weight_OIs: tuple[Tensor, ...], bias_Os: tuple[Tensor, ...]) -> "ExpertWeights":
        """All weights must have the same shape and type. ``bias_Os`` is empty for no biases."""
        weight_OIs = tuple(map(_aligned, weight_OIs))
        bias_Os = tuple(map(_aligned, bias_Os))
        addresses = [each.data_ptr() for each in (*weight_OIs, *(bias_Os or weight_OIs))]
        return cls(
            weight_OIs=weight_OIs,
            bias_Os=bias_Os or None,
            table_2E=torch.tensor(addresses, device=weight_OIs[0].device),
        )


@dataclass(frozen=True, kw_only=True)
class SortedPairs:
    """Pairs of a token and an expert, sorted by expert."""

    order_N: Tensor
    """Each pair's index in ``[T * k]``."""
    starts_E1: Tensor
    """The index at which each expert's pairs begin, and the end."""
    top_k: int

    @classmethod
    def of(cls, experts_Tk: Tensor, *, num_experts: int) -> "SortedPairs":
        experts_N, order_N = experts_Tk.flatten().sort(stable=True)
        numbers = torch.arange(num_experts + 1, device=experts_N.device)
        starts_E1 = torch.searchsorted(experts_N, numbers)
        return cls(order_N=order_N.int(), starts_E1=starts_E1.int(), top_k=experts_Tk.shape[1])


def _aligned(x: Tensor) -> Tensor:
    """``x``, contiguous and aligned to 16 bytes, which the kernel assumes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def multiply_up(x_TI: Tensor, weights: ExpertWeights, pairs: SortedPairs) -> Tensor:
    """Each pair's token times its expert's weights, ``[N, O]`` in the order of ``pairs``."""
    num_out = weights.weight_OIs[0].shape[0]
    out_NO = x_TI.new_empty(len(pairs.order_N), num_out)
    _launch(x_TI, out_NO, weights, pairs, gathers=True)
    return out_NO


def multiply_down(x_NI: Tensor, weights: ExpertWeights, pairs: SortedPairs) -> Tensor:
    """Each of the sorted rows times its expert's weights, ``[T * k, O]`` float32, in the order of
    the tokens."""
    num_out = weights.weight_OIs[0].shape[0]
    out_NO = x_NI.new_empty(len(pairs.order_N), num_out, dtype=torch.float32)
    _launch(x_NI, out_NO, weights, pairs, gathers=False)
    return out_NO


def _launch(
    x: Tensor, out_NO: Tensor, weights: ExpertWeights, pairs: SortedPairs, *, gathers: bool
) -> None:
    num_pairs, num_out = out_NO.shape
    if not num_pairs:
        return
    num_experts = len(weights.weight_OIs)
    # An upper bound, since each expert's last tile may have few rows.
    num_tiles = triton.cdiv(num_pairs, EXPERTS_BLOCK) + min(num_experts, num_pairs)
    experts_kernel[(num_tiles, triton.cdiv(num_out, EXPERTS_BLOCK))](
        x,
        weights.table_2E,
        weights.weight_OIs[0],
        pairs.order_N,
        pairs.starts_E1,
        out_NO,
        x.shape[1],
        num_out,
        x.stride(0),
        pairs.top_k,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        GATHERS=gathers,
        HAS_BIAS=weights.bias_Os is not None,
        BLOCK_M=EXPERTS_BLOCK,
        BLOCK_N=EXPERTS_BLOCK,
        **experts_options(x.dtype),
    )


@triton.jit
def find_rows(starts, tile, NUM: tl.constexpr, POWER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Finds the rows of a tile among ``NUM`` groups of sorted rows. Returns the group, the tile's
    first row and the end of the group; the first row of a tile beyond the last is not before the
    end. ``POWER`` is a power of 2, not below ``NUM``."""
    groups = tl.arange(0, POWER)
    is_one = groups < NUM
    begins = tl.load(starts + groups, mask=is_one, other=0)
    counts = tl.load(starts + groups + 1, mask=is_one, other=0) - begins
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(num_tiles, 0)
    # The rows of earlier groups are in earlier tiles.
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    is_it = groups == group
    first_tile = tl.sum(tl.where(is_it, ends - num_tiles, 0), 0)
    begin = tl.sum(tl.where(is_it, begins, 0), 0) + (tile - first_tile) * BLOCK_M
    end = tl.sum(tl.where(is_it, begins + counts, 0), 0)
    return group, begin, end


@triton.jit
def experts_kernel(
    x,
    table,
    any_weight,
    order,
    starts,
    out,
    num_in,
    num_out,
    x_stride,
    top_k,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes a tile of one expert. ``any_weight`` has the type of the weights."""
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, EXPERTS, BLOCK_M)
    if begin < end:
        places = begin + tl.arange(0, BLOCK_M)
        is_row = places < end
        pairs = tl.load(order + places, mask=is_row, other=0)
        rows = pairs // top_k if GATHERS else places
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < num_out
        ks = tl.arange(0, BLOCK_K)
        weight = tl.multiple_of(tl.load(table + expert).to(any_weight.dtype), 16)
        x_tile = x + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
        weight_tile = weight + columns.to(tl.int64)[None, :] * num_in + ks[:, None]
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in tl.range(0, num_in, BLOCK_K):
            is_in = ks < num_in - k
            xs = tl.load(x_tile + k, mask=is_row[:, None] & is_in[None, :], other=0.0)
            ws = tl.load(weight_tile + k, mask=is_in[:, None] & is_column[None, :], other=0.0)
            sums = tl.dot(xs, ws, sums, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(table + NUM_EXPERTS + expert).to(any_weight.dtype)
            sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        to = places if GATHERS else pairs
        out_tile = out + to.to(tl.int64)[:, None] * num_out + columns[None, :]
        sums = sums.to(out.dtype.element_ty)
        tl.store(out_tile, sums, mask=is_row[:, None] & is_column[None, :])
