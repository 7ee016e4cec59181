"""A Triton product with 4-bit weights, which stay packed in the GPU's memory.

A program computes a tile of rows and outputs, and decodes the weights of a step of inputs before it
multiplies them, to the values of `GroupedWeight.decode`. A row's sum runs over the inputs in steps
of a fixed length, in a fixed tile shape, so its bits do not depend on the other rows.

Traffic: half a byte for each weight and 4 bytes for each scale, once for each 64 rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.grouped import ZERO, GroupedWeight
from quire.kernels.triton.launch import GROUPED_TILE, grouped_options

# T tokens   I, O a layer's input and output   G groups of inputs   K inputs of a step
# J bytes of all steps: the codes of a step's first half are low, those of its second half high

_STEP = GROUPED_TILE["BLOCK_K"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLinear:
    """A linear layer with 4-bit weights."""

    packed_OJ: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None
    num_in: int
    dtype: torch.dtype
    bias_O: Tensor | None

    @classmethod
    def of(cls, weight: GroupedWeight, bias_O: Tensor | None) -> "GroupedLinear":
        code_OI, scale_OG, zero_OG = weight.stored()
        num_out, num_in = code_OI.shape
        code_OI = torch.nn.functional.pad(code_OI, (0, -num_in % _STEP))
        low, high = code_OI.view(num_out, -1, 2, _STEP // 2).unbind(2)
        return cls(
            packed_OJ=(low | high << 4).flatten(1).contiguous(),
            scale_OG=scale_OG,
            zero_OG=zero_OG,
            num_in=num_in,
            dtype=weight.dtype,
            bias_O=bias_O,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.packed_OJ), self.num_in

    def decode(self) -> Tensor:
        """The dequantised matrix."""
        packed = self.packed_OJ.view(len(self.packed_OJ), -1, 1, _STEP // 2)
        code_OI = torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)[:, : self.num_in]
        weight = GroupedWeight(
            code_OI=code_OI, scale_OG=self.scale_OG, zero_OG=self.zero_OG, dtype=self.dtype
        )
        return weight.decode()

    def __call__(self, x_TI: Tensor) -> Tensor:
        num_rows, num_out = len(x_TI), len(self.packed_OJ)
        out_TO = x_TI.new_empty(num_rows, num_out)
        if not num_rows:
            return out_TO
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_tiles = triton.cdiv(num_rows, GROUPED_TILE["BLOCK_M"])
        grid = (num_tiles, triton.cdiv(num_out, GROUPED_TILE["BLOCK_N"]))
        num_groups = self.scale_OG.shape[1]
        grouped_kernel[grid](
            x_TI,
            self.packed_OJ,
            self.scale_OG,
            self.scale_OG if self.zero_OG is None else self.zero_OG,
            x_TI if self.bias_O is None else self.bias_O,
            out_TO,
            num_rows,
            self.num_in,
            num_out,
            num_groups,
            self.packed_OJ.shape[1],
            x_TI.stride(0),
            GROUP=self.num_in // num_groups,
            ZERO_CODE=ZERO,
            HAS_ZEROS=self.zero_OG is not None,
            HAS_BIAS=self.bias_O is not None,
            **GROUPED_TILE,
            **grouped_options(x_TI.dtype),
        )
        return out_TO


@triton.jit
def add_half(
    sums,
    codes,
    x_rows,
    scales,
    zeros,
    first,
    num_in,
    is_row,
    is_column,
    GROUP: tl.constexpr,
    ZERO_CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Adds the products of half a step's inputs, from ``first`` on, to the sums."""
    ks = first + tl.arange(0, HALF)
    is_in = ks < num_in
    xs = tl.load(x_rows + ks[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
    groups = (ks // GROUP)[:, None]
    is_weight = is_in[:, None] & is_column[None, :]
    scale = tl.load(scales + groups, mask=is_weight, other=0.0)
    if HAS_ZEROS:
        zero = tl.load(zeros + groups, mask=is_weight, other=0).to(tl.float32)
    else:
        zero = tl.full([1, 1], ZERO_CODE, dtype=tl.float32)
    weights = ((codes.to(tl.float32) - zero) * scale).to(xs.dtype)
    return tl.dot(xs, weights, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def grouped_kernel(
    x,
    packed,
    scale,
    zero,
    bias,
    out,
    num_rows,
    num_in,
    num_out,
    num_groups,
    packed_stride,
    x_stride,
    GROUP: tl.constexpr,
    ZERO_CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_K // 2
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_out
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    wide = columns.to(tl.int64)[None, :]
    places = packed + wide * packed_stride + tl.arange(0, HALF)[:, None]
    scales, zeros = scale + wide * num_groups, zero + wide * num_groups
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, num_in, BLOCK_K):
        both = tl.load(places + k // 2, mask=is_column[None, :], other=0)
        sums = add_half(
            sums, both & 15, x_rows, scales, zeros, k, num_in, is_row, is_column,
            GROUP, ZERO_CODE, HAS_ZEROS, HALF,
        )  # fmt: skip
        sums = add_half(
            sums, both >> 4, x_rows, scales, zeros, k + HALF, num_in, is_row, is_column,
            GROUP, ZERO_CODE, HAS_ZEROS, HALF,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_tile = out + rows.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(out_tile, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
