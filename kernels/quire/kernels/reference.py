"""What every kernel must compute, in plain PyTorch: the oracle, written to be read.

Runs on any device. Nothing here is fast, and nothing else defines the results: a kernel that
disagrees with its twin is wrong. Sums are taken in float32 whatever the inputs are.

The KV cache of one layer is two contiguous tensors ``[num_blocks, block_size, K, D]``; in int8 the
float32 scale of the D values follows them, in `SCALE_BYTES` of its own. Token
``t`` of a sequence lives in block ``block_table[t // block_size]``, at ``t % block_size``; the two
together are its slot, ``block * block_size + offset``. Slots that no token was written to may
hold anything, NaN included.

Beside it, `reference_sampling` is the same for what comes after the logits.
"""

import math

import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.grouped import ZERO, GroupedWeight
from quire.kernels.quantization import SCALE_BYTES

# T tokens of the step, packed   B sequences   M blocks of the longest   N blocks in the cache
# S slots in a block   H query heads   K KV heads   D head size   R half of the rotated size
# C channels   F channels of the MLP   A heads of Q, K and V together
# I, O a linear layer's input and output   P parts of the input


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    *,
    options: AttentionOptions = PLAIN,
) -> None:
    """Stores the step's K and V in their slots. Slots are distinct and valid.

    A cache of float8_e4m3fn gets them divided by their scales, and limited to its 448.
    """
    if k_cache.dtype == torch.float8_e4m3fn:
        k_TKD = (k_TKD.float() * (1 / options.k_scale)).clamp(-448, 448).to(k_cache.dtype)
        v_TKD = (v_TKD.float() * (1 / options.v_scale)).clamp(-448, 448).to(v_cache.dtype)
    elif k_cache.dtype == torch.int8:
        k_TKD, v_TKD = to_int8(k_TKD), to_int8(v_TKD)
    for token, slot in enumerate(slot_mapping_T.tolist()):
        block, offset = divmod(slot, k_cache.shape[1])
        k_cache[block, offset] = k_TKD[token]
        v_cache[block, offset] = v_TKD[token]


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_tables_BM: Tensor,
    seq_lens_B: Tensor,
    query_starts_B1: Tensor,
    scale: float,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Causal attention of each row's new tokens over all of its tokens, from the paged cache.

    Row b's queries are ``q[query_starts[b]:query_starts[b + 1]]``; the last of them stands at
    position ``seq_lens[b] - 1``, and what comes before the first is its cached context. A decode
    is a row with one query. The KV of the new tokens is in the cache already. ``H`` is a multiple
    of ``K``: query head h reads KV head ``h // (H // K)``.

    ``options`` says what the layer does beyond that. Returns ``[T, H, D]`` in q's dtype. Rows
    without tokens add nothing.
    """
    num_heads, num_kv_heads = q_THD.shape[1], k_cache.shape[2]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    starts = query_starts_B1.tolist()
    for row, seq_len in enumerate(seq_lens_B.tolist()):
        start, end = starts[row], starts[row + 1]
        k_HLD = _gather(k_cache, block_tables_BM[row], seq_len, num_heads // num_kv_heads)
        v_HLD = _gather(v_cache, block_tables_BM[row], seq_len, num_heads // num_kv_heads)
        if k_cache.dtype == torch.float8_e4m3fn:
            k_HLD, v_HLD = k_HLD * options.k_scale, v_HLD * options.v_scale
        q_HQD = q_THD[start:end].transpose(0, 1).float()
        positions_Q = torch.arange(seq_len - (end - start), seq_len, device=q_THD.device)
        tokens_L = torch.arange(seq_len, device=q_THD.device)
        scores_HQL = (q_HQD @ k_HLD.transpose(1, 2)) * scale
        if options.soft_cap is not None:
            scores_HQL = options.soft_cap * torch.tanh(scores_HQL / options.soft_cap)
        unseen_QL = tokens_L > positions_Q[:, None]
        if options.window is not None:
            unseen_QL |= tokens_L <= positions_Q[:, None] - options.window
        scores_HQL = scores_HQL.masked_fill(unseen_QL, float("-inf"))
        if options.sinks is not None:
            sinks_H11 = scores_HQL.new_tensor(options.sinks).view(-1, 1, 1)
            sinks_HQ1 = sinks_H11.expand(-1, scores_HQL.shape[1], -1)
            scores_HQL = torch.cat([scores_HQL, sinks_HQ1], dim=-1)
        out_HQD = torch.softmax(scores_HQL, dim=-1)[..., :seq_len] @ v_HLD
        out_THD[start:end] = out_HQD.transpose(0, 1).to(q_THD.dtype)
    return out_THD


def _gather(cache: Tensor, block_table_M: Tensor, seq_len: int, group: int) -> Tensor:
    """The first ``seq_len`` tokens of a sequence as float32 ``[H, seq_len, D]``."""
    num_blocks = -(-seq_len // cache.shape[1])
    tokens_LKD = cache[block_table_M[:num_blocks].long()].flatten(0, 1)[:seq_len]
    if cache.dtype == torch.int8:
        tokens_LKD = from_int8(tokens_LKD)
    return tokens_LKD.float().repeat_interleave(group, dim=1).transpose(0, 1)


def to_int8(x_TKD: Tensor) -> Tensor:
    """As an int8 cache keeps tokens, ``[T, K, D + SCALE_BYTES]``; `quantize` says how."""
    values_N1D, scale_N1 = quantize(x_TKD.flatten(0, 1))
    joined = torch.cat([values_N1D[:, 0], scale_N1.view(torch.int8)], dim=1)
    return joined.view(*x_TKD.shape[:2], -1)


def from_int8(stored: Tensor) -> Tensor:
    """`to_int8` undone, in float32, whatever the leading dimensions."""
    # A copy, as float32 must be aligned.
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
    """A norm whose weights are float32, and which is rounded to x's dtype at its end: an RMS norm,
    as in Gemma and OLMo 2, or a layer norm, which is centred."""
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


def rotate_and_write_kv(
    qkv_TAD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    *,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Rotates Q and K of a fused product, stores K and V in their slots; returns Q, ``[T, H, D]``.

    The A heads of the product are those of Q, then K, then V.
    """
    num_kv_heads = k_cache.shape[2]
    qk_TAD, v_TKD = qkv_TAD[:, :-num_kv_heads], qkv_TAD[:, -num_kv_heads:]
    qk_TAD = rotary_embedding(qk_TAD, cos_TR, sin_TR)
    write_kv(qk_TAD[:, -num_kv_heads:], v_TKD, k_cache, v_cache, slot_mapping_T, options=options)
    return qk_TAD[:, :-num_kv_heads]


def silu_and_mul(gate_up_TG: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 F]``, gate first; ``[T, F]`` in the same dtype.

    Step by step, as the bits of PyTorch's own depend on where a value stands in its tensor.
    """
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    wide_TF = gate_TF.float()
    return (wide_TF / (1 + torch.exp(-wide_TF))).to(gate_up_TG.dtype) * up_TF


def clamped_silu_and_mul(gate_up_TG: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gpt-oss' ``(up + 1) * gate * sigmoid(alpha * gate)`` of gates up to ``limit`` and ups within
    it on both sides; shapes and steps are as in `silu_and_mul`."""
    gate_TF, up_TF = gate_up_TG.float().chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    glu_TF = gate_TF / (1 + torch.exp(-alpha * gate_TF))
    return ((up_TF + 1) * glu_TF).to(gate_up_TG.dtype)


def gelu(x_TF: Tensor) -> Tensor:
    """GELU by the formula with tanh; the steps are as in `silu_and_mul`."""
    wide_TF = x_TF.float()
    inner_TF = math.sqrt(2 / math.pi) * (wide_TF + 0.044715 * (wide_TF * wide_TF * wide_TF))
    return (0.5 * wide_TF * (1 + torch.tanh(inner_TF))).to(x_TF.dtype)


def gelu_and_mul(gate_up_TG: Tensor) -> Tensor:
    """``gelu(gate) * up``, as `silu_and_mul`."""
    gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
    return gelu(gate_TF) * up_TF


def quantize(x_TI: Tensor, *, num_parts: int = 1) -> tuple[Tensor, Tensor]:
    """Rows as int8 ``[T, P, I / P]`` and float32 scales ``[T, P]``, of which x is the product.

    Each of the row's parts by itself, its greatest magnitude as 127; halves round to even.
    """
    x_TPI = x_TI.float().reshape(len(x_TI), num_parts, x_TI.shape[1] // num_parts)
    most_TP = x_TPI.abs().amax(-1)
    # Not `127 / most`, which PyTorch rounds twice: `127 * (1 / most)`.
    inverse_TP = torch.where(most_TP > 1e-30, torch.tensor(127.0) / most_TP, 0)
    return (x_TPI * inverse_TP[..., None]).round().to(torch.int8), most_TP / 127


def int8_linear(x_TI: Tensor, weight_OPI: Tensor, scale_OP: Tensor) -> Tensor:
    """A linear layer of quantised weights and inputs, in float32: `quantize` says how.

    A part's sum is exact, then rounded, then multiplied with the weights' scale, then with the
    input's; the parts, a power of two of them, are added as a binary tree.
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


def grouped_linear(x_TI: Tensor, weight: GroupedWeight) -> Tensor:
    """A linear layer of weights of 4 bits, in float32: each group's sum of products with whole
    numbers, times its scale, in the order of the groups."""
    num_groups = weight.scale_OG.shape[1]
    x_TGL = x_TI.float().view(len(x_TI), num_groups, -1)
    zero_OG = ZERO if weight.zero_OG is None else weight.zero_OG.float()
    code_OGL = weight.code_OI.view(-1, num_groups, weight.group).float()
    level_OGL = code_OGL - torch.as_tensor(zero_OG)[..., None]
    sums_GTO = x_TGL.transpose(0, 1) @ level_OGL.permute(1, 2, 0)
    return (sums_GTO * weight.scale_OG.T[:, None]).sum(0)
