"""Triton KV write: scatters the step's K and V into their slots of the paged cache.

One program a token. Traffic: ``2 * T * K * D`` elements read and as many written, and 8 bytes of
slot a token.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.triton.fp8 import cache_view, to_e4m3
from quire.kernels.triton.launch import WRITE_OPTIONS

# T tokens of the step, packed   K KV heads   D head size


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    *,
    options: AttentionOptions = PLAIN,
) -> None:
    """Stores ``k[t]`` and ``v[t]`` in slot ``slot_mapping[t]``. Slots must be distinct and valid.

    For a float8 cache, values are divided by their scales and clamped to its range. ``k`` and ``v``
    may be views into a fused QKV product: only each token's values must be contiguous.
    """
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    if num_tokens == 0:
        return
    size = num_kv_heads * head_size
    write_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        cache_view(k_cache),
        cache_view(v_cache),
        slot_mapping_T,
        1 / options.k_scale,
        1 / options.v_scale,
        k_TKD.stride(0),
        v_TKD.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        **WRITE_OPTIONS,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_factor,
    v_factor,
    k_stride,
    v_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # int64: a cache of 2^31 elements is 4 GiB of bfloat16.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    values = tl.arange(0, BLOCK)
    inside = values < SIZE
    k = tl.load(k_ptr + token * k_stride + values, mask=inside)
    v = tl.load(v_ptr + token * v_stride + values, mask=inside)
    if k_cache_ptr.dtype.element_ty == tl.uint8:
        k = to_e4m3(k.to(tl.float32) * k_factor)
        v = to_e4m3(v.to(tl.float32) * v_factor)
    tl.store(k_cache_ptr + slot * SIZE + values, k, mask=inside)
    tl.store(v_cache_ptr + slot * SIZE + values, v, mask=inside)
