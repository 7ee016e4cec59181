"""The definition of what kernels compute, in readable plain PyTorch, for any device.

A kernel that disagrees with its twin here is wrong. Sums are taken in float32 whatever the type of
the inputs. These functions also run where there is no kernel. `paged` has those of the paged KV
cache, and `sampling` those of sampling.
"""

import math

import torch
from torch import Tensor

from quire.kernels.quantization import SCALE_BYTES

# T tokens of the step, packed   B sequences   M blocks of the longest   N blocks in the cache
# S slots in a block   H query heads   K KV heads   D head size   R half of the rotated size
# C channels   F channels of the MLP   A heads of Q, K and V together
# I, O a linear layer's input and output   P parts of the input


def to_int8(x_TKD: Tensor) -> Tensor:
    """Quantises tokens for an int8 cache, ``[T, K, D + SCALE_BYTES]``; see `quantize`."""
    values_N1D, scale_N1 = quantize(x_TKD.flatten(0, 1))
    joined = torch.cat([values_N1D[:, 0], scale_N1.view(torch.int8)], dim=1)
    return joined.view(*x_TKD.shape[:2], -1)


def from_int8(stored: Tensor) -> Tensor:
    """The inverse of `to_int8`, in float32, for any leading dimensions."""
    # A copy, because float32 must be aligned.
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    return stored[..., :-SCALE_BYTES] * scale.view(torch.float32)


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``x + residual``, and that sum itself: the residual of the next layer.

    Without a residual the sum is ``x``. As in Hugging Face's Llama, the sum is rounded to x's
    dtype before the norm, and the normed value before it is multiplied with the weight.
    """
    sum_TC = x_TC if residual_TC is None else x_TC + residual_TC
    wide_TC = sum_TC.float()
    normed_TC = wide_TC * torch.rsqrt(wide_TC.pow(2).mean(-1, keepdim=True) + eps)
    return weight_C * normed_TC.to(x_TC.dtype), sum_TC


def wide_norm(
    x_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, *, eps: float, is_centred: bool
) -> Tensor:
    """A norm with float32 weights that is rounded to x's dtype at the end: an RMS norm, as in Gemma
    and OLMo 2, or a layer norm if ``is_centred``."""
    wide_TC = x_TC.float()
    if is_centred:
        wide_TC = wide_TC - wide_TC.mean(-1, keepdim=True)
    normed_TC = wide_TC * torch.rsqrt(wide_TC.pow(2).mean(-1, keepdim=True) + eps)
    out_TC = normed_TC * weight_C
    return (out_TC if bias_C is None else out_TC + bias_C).to(x_TC.dtype)


def rotary_embedding(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotates the first ``2 R`` channels of each head, pairing channel i with channel i + R.

    The half-split ("neox") pairing of Hugging Face's Llama; ``cos`` and ``sin`` are float32 rows
    of the tokens' positions. Channels from ``2 R`` on pass through. Computed in float32.
    """
    half = cos_TR.shape[-1]
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    x1_THR = x_THD[..., :half].float()
    x2_THR = x_THD[..., half : 2 * half].float()
    rotated = (x1_THR * cos_T1R - x2_THR * sin_T1R, x2_THR * cos_T1R + x1_THR * sin_T1R)
    return torch.cat([*(r.to(x_THD.dtype) for r in rotated), x_THD[..., 2 * half :]], dim=-1)


def silu_and_mul(gate_up_TG: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 F]``, gate first; ``[T, F]`` in the same dtype.

    Computed step by step, because the bits of PyTorch's own depend on a value's place in its
    tensor.
    """
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    wide_TF = gate_TF.float()
    return (wide_TF / (1 + torch.exp(-wide_TF))).to(gate_up_TG.dtype) * up_TF


def clamped_silu_and_mul(gate_up_TG: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gpt-oss' ``(up + 1) * gate * sigmoid(alpha * gate)``, with gates clamped to at most ``limit``
    and ups to ``-limit`` … ``limit``; shapes and steps are as in `silu_and_mul`."""
    gate_TF, up_TF = gate_up_TG.float().chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    glu_TF = gate_TF / (1 + torch.exp(-alpha * gate_TF))
    return ((up_TF + 1) * glu_TF).to(gate_up_TG.dtype)


def gelu(x_TF: Tensor) -> Tensor:
    """GELU in the approximation with tanh; the steps are as in `silu_and_mul`."""
    wide_TF = x_TF.float()
    inner_TF = math.sqrt(2 / math.pi) * (wide_TF + 0.044715 * (wide_TF * wide_TF * wide_TF))
    return (0.5 * wide_TF * (1 + torch.tanh(inner_TF))).to(x_TF.dtype)


def gelu_and_mul(gate_up_TG: Tensor) -> Tensor:
    """``gelu(gate) * up``; shapes and steps are as in `silu_and_mul`."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return gelu(gate_TF) * up_TF


def quantize(x_TI: Tensor, *, num_parts: int = 1) -> tuple[Tensor, Tensor]:
    """Quantises rows to int8 ``[T, P, I / P]`` and float32 scales ``[T, P]``; x is their product.

    Each part of a row is scaled on its own, its greatest magnitude to 127. Halves round to even.
    """
    x_TPI = x_TI.float().reshape(len(x_TI), num_parts, x_TI.shape[1] // num_parts)
    most_TP = x_TPI.abs().amax(-1)
    # Not `127 / most`, which PyTorch computes as `127 * (1 / most)` and so rounds twice.
    inverse_TP = torch.where(most_TP > 1e-30, torch.tensor(127.0) / most_TP, 0)
    return (x_TPI * inverse_TP[..., None]).round().to(torch.int8), most_TP / 127


def int8_linear(x_TI: Tensor, weight_OPI: Tensor, scale_OP: Tensor) -> Tensor:
    """A linear layer whose weights and inputs were quantised by `quantize`; the result is float32.

    A part's sum is exact, then rounded, then multiplied by the weights' scale, then by the input's.
    The parts, whose number is a power of two, are added as a binary tree.
    """
    x_TPI, x_scale_TP = quantize(x_TI, num_parts=weight_OPI.shape[1])
    parts = [
        (x_TPI[:, part].double() @ weight_OPI[:, part].double().T).float()
        * scale_OP[:, part]
        * x_scale_TP[:, part, None]
        for part in range(weight_OPI.shape[1])
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
