"""Triton KV write: scatters the step's K and V into their slots of the paged cache.

One program a token. Traffic: ``2 * T * K * D`` elements read and as many written, and 8 bytes of
slot a token.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import WRITE_OPTIONS

# T tokens of the step, packed   K KV heads   D head size


def write_kv(
    k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor
) -> None:
    """Stores ``k[t]`` and ``v[t]`` in slot ``slot_mapping[t]``. Slots are distinct and valid.

    ``k`` and ``v`` may be views into a fused QKV product: only a token's own values are one piece.
    """
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    if num_tokens == 0:
        return
    size = num_kv_heads * head_size
    write_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        k_cache,
        v_cache,
        slot_mapping_T,
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
    tl.store(k_cache_ptr + slot * SIZE + values, k, mask=inside)
    tl.store(v_cache_ptr + slot * SIZE + values, v, mask=inside)
