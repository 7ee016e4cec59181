"""Triton norms and gated activation: the element-wise steps between a layer's matrix products.

Both round where their twins do, so they differ only by the order of the norm's sum and the last bit
of an exponential. One program sums a whole row, in an order that depends on the number of channels
alone.

Traffic: the norm reads ``x``, and ``residual`` if there is one, and writes as much; the activation
reads two elements for each that it writes. A torch expression for either moves three to five times
as much, and launches as many kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import (
    ACTIVATION_BLOCK,
    ELEMENTWISE_OPTIONS,
    MAX_CHANNELS,
    norm_options,
)

# T tokens of the step, packed   C channels   F channels of the MLP


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.rms_norm`. Each row of ``x`` and ``residual`` must be contiguous."""
    num_tokens, num_channels = x_TC.shape
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    has_residual = residual_TC is not None
    residual = x_TC if residual_TC is None else residual_TC
    sum_TC = torch.empty_like(out_TC) if has_residual else x_TC
    if num_tokens == 0:
        return out_TC, sum_TC
    rms_norm_kernel[(num_tokens,)](
        x_TC,
        residual,
        weight_C,
        out_TC,
        sum_TC,
        eps,
        x_TC.stride(0),
        residual.stride(0),
        SIZE=num_channels,
        BLOCK=triton.next_power_of_2(num_channels),
        HAS_RESIDUAL=has_residual,
        **norm_options(num_channels),
    )
    return out_TC, sum_TC


def wide_norm(
    x_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, *, eps: float, is_centred: bool
) -> Tensor:
    """`reference.wide_norm`. Each row of ``x`` must be contiguous."""
    num_tokens, num_channels = x_TC.shape
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out_TC
    wide_norm_kernel[(num_tokens,)](
        x_TC,
        weight_C,
        weight_C if bias_C is None else bias_C,
        out_TC,
        eps,
        x_TC.stride(0),
        SIZE=num_channels,
        BLOCK=triton.next_power_of_2(num_channels),
        HAS_BIAS=bias_C is not None,
        IS_CENTRED=is_centred,
        # Twice the warps, since weights and biases in float32 do not fit the registers of sm_80.
        **norm_options(max(num_channels, min(2 * num_channels, MAX_CHANNELS))),
    )
    return out_TC


def silu_and_mul(gate_up_TG: Tensor) -> Tensor:
    """`reference.silu_and_mul`."""
    num_tokens, size = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    out_TF = gate_up_TG.new_empty(num_tokens, size)
    if num_tokens == 0:
        return out_TF
    silu_and_mul_kernel[(num_tokens, triton.cdiv(size, ACTIVATION_BLOCK))](
        gate_up_TG,
        out_TF,
        gate_up_TG.stride(0),
        SIZE=size,
        BLOCK=ACTIVATION_BLOCK,
        **ELEMENTWISE_OPTIONS,
    )
    return out_TF


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    inside = channels < SIZE
    x = tl.load(x_ptr + row * x_stride + channels, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + row * residual_stride
        residual = tl.load(residual_row + channels, mask=inside, other=0.0)
        x = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * SIZE + channels, x, mask=inside)
        wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + channels, (weight * normed).to(x.dtype), mask=inside)


@triton.jit
def wide_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    inside = channels < SIZE
    x = tl.load(x_ptr + row * x_stride + channels, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if IS_CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / SIZE, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    out = normed * tl.load(weight_ptr + channels, mask=inside, other=0.0)
    if HAS_BIAS:
        out += tl.load(bias_ptr + channels, mask=inside, other=0.0)
    tl.store(out_ptr + row * SIZE + channels, out.to(x.dtype), mask=inside)


@triton.jit
def silu_and_mul_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < SIZE
    gate_row = gate_up_ptr + row * gate_up_stride
    gate = tl.load(gate_row + channels, mask=inside, other=0.0)
    up = tl.load(gate_row + SIZE + channels, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * SIZE + channels, out, mask=inside)
