"""Triton rotary embedding, and the KV write that follows it, as one kernel.

The kernel reads the fused QKV product: queries are rotated into a new tensor, keys are rotated into
the cache, and values are copied to it. A program handles a few heads of one token.

Traffic: Q, K and V are read once and written once, and ``8 R`` bytes of cosines and sines a token.
As two kernels, they would also write the rotated keys and read them again.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.triton.fp8 import cache_view, to_e4m3
from quire.kernels.triton.launch import ELEMENTWISE_OPTIONS, rotary_heads

# T tokens of the step, packed   A heads of the fused product: H query heads and twice K KV heads
# D head size   R half of the rotated size


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
    """`reference.paged.rotate_and_write_kv`. Each token of ``qkv`` must be contiguous."""
    num_tokens, num_all_heads, head_size = qkv_TAD.shape
    num_kv_heads = k_cache.shape[2]
    num_heads = num_all_heads - 2 * num_kv_heads
    q_THD = qkv_TAD.new_empty(num_tokens, num_heads, head_size)
    if num_tokens == 0:
        return q_THD
    block_h = rotary_heads(head_size)
    rotary_kernel[(num_tokens, triton.cdiv(num_all_heads, block_h))](
        qkv_TAD,
        q_THD,
        cos_TR,
        sin_TR,
        cache_view(k_cache),
        cache_view(v_cache),
        slot_mapping_T,
        1 / options.k_scale,
        1 / options.v_scale,
        qkv_TAD.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=cos_TR.shape[1],
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_size),
        **ELEMENTWISE_OPTIONS,
    )
    return q_THD


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def rotary_kernel(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_factor,
    v_factor,
    x_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    channels = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (channels < HEAD_SIZE)
    x_heads = x_ptr + token * x_stride + heads * HEAD_SIZE
    x = tl.load(x_heads + channels, mask=inside, other=0.0)

    # Channel i pairs with channel i + HALF; V, and channels past both halves, are unchanged.
    is_first = channels < HALF
    angles = tl.where(is_first, channels, channels - HALF)
    is_angle = channels < 2 * HALF
    is_rotated = inside & is_angle & (heads < NUM_HEADS + NUM_KV_HEADS)
    partners = tl.where(is_first, channels + HALF, channels - HALF)
    partner = tl.load(x_heads + partners, mask=is_rotated, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + angles, mask=is_angle, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + angles, mask=is_angle, other=0.0)
    turned = partner * sin
    rotated = x.to(tl.float32) * cos + tl.where(is_first, -turned, turned)
    out = tl.where(is_rotated, rotated.to(x.dtype), x)

    q_offsets = (token * NUM_HEADS + heads) * HEAD_SIZE + channels
    tl.store(out_ptr + q_offsets, out, mask=inside & (heads < NUM_HEADS))
    # int64: a cache of 2^31 elements is 4 GiB of bfloat16.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    k_heads = heads - NUM_HEADS
    v_heads = k_heads - NUM_KV_HEADS
    k_offsets = (slot * NUM_KV_HEADS + k_heads) * HEAD_SIZE + channels
    v_offsets = (slot * NUM_KV_HEADS + v_heads) * HEAD_SIZE + channels
    if k_cache_ptr.dtype.element_ty == tl.uint8:
        factor = tl.where(v_heads < 0, k_factor, v_factor)
        out = to_e4m3(out.to(tl.float32) * factor)
    is_k = inside & (k_heads >= 0) & (v_heads < 0)
    tl.store(k_cache_ptr + k_offsets, out, mask=is_k)
    tl.store(v_cache_ptr + v_offsets, out, mask=inside & (v_heads >= 0))
