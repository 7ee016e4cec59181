"""The definition of the kernels of the paged KV cache, in readable plain PyTorch: their oracle. It
extends `quire.kernels.reference.layers` and follows its rules.

The KV cache of one layer is two contiguous tensors ``[num_blocks, block_size, K, D]``; in int8 the
float32 scale of the D values follows them, in `SCALE_BYTES` of its own. Token ``t`` of a sequence
is in block ``block_table[t // block_size]`` at offset ``t % block_size``; its slot is
``block * block_size + offset``. Unused slots may hold any value, NaN included.
"""

import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.grouped import ZERO, GroupedWeight
from quire.kernels.reference.layers import from_int8, rotary_embedding, to_int8

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   D head size   R half of the rotated size   A heads of Q, K and V together
# I, O a linear layer's input and output


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    *,
    options: AttentionOptions = PLAIN,
) -> None:
    """Stores the step's K and V in their slots, which must be distinct and valid.

    For a cache of float8_e4m3fn, values are divided by their scales and clamped to ±448.
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

    Row b's queries are ``q[query_starts[b]:query_starts[b + 1]]``; the last of them is at position
    ``seq_lens[b] - 1``, and tokens before the first are its cached context. A decode is a row with
    one query. The KV of the new tokens is in the cache already. ``H`` is a multiple of ``K``: query
    head h reads KV head ``h // (H // K)``.

    ``options`` modify this. Returns ``[T, H, D]`` in q's dtype. Rows without tokens have no output.
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
        unseen_QL = tokens_L > positions_Q[:, None] + options.lookahead
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


def grouped_linear(x_TI: Tensor, weight: GroupedWeight) -> Tensor:
    """A linear layer with 4-bit weights, in float32: each group's sum of products with integers,
    times the group's scale, added in the order of the groups."""
    num_groups = weight.scale_OG.shape[1]
    x_TGL = x_TI.float().view(len(x_TI), num_groups, -1)
    zero_OG = ZERO if weight.zero_OG is None else weight.zero_OG.float()
    code_OGL = weight.code_OI.view(-1, num_groups, weight.group).float()
    level_OGL = code_OGL - torch.as_tensor(zero_OG)[..., None]
    sums_GTO = x_TGL.transpose(0, 1) @ level_OGL.permute(1, 2, 0)
    return (sums_GTO * weight.scale_OG.T[:, None]).sum(0)
