"""Triton prefill attention: many queries of each sequence over its paged KV, cached context first.

A program takes `block_m` consecutive rows of one sequence and one KV head, where a row is a
(query, head of the group) pair: all heads that share KV share its loads, whatever their number.
It walks the KV from token 0 up to the last token that its last query sees.

Traffic of a sequence with Q queries and context L: q and the output once, K and V
``ceil(Q * G / block_m)`` times (from L2, as the tiles of one head run side by side); flops
``4 * H * D`` for every pair of a query and a token it sees.

A row's bits do not depend on the batch nor on how its prompt was cut into chunks.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.launch import block_shift, capped_scales, device_capability, launch_config
from quire.kernels.triton_fp8 import cache_view, loaded_scale
from quire.kernels.triton_tile import attend_tile, load_kv_tile

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads   D head size


def prefill_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    *,
    block_tables_BM: Tensor,
    seq_lens_B: Tensor,
    query_starts_B1: Tensor,
    first_row: int,
    max_query_len: int,
    scale: float,
    options: AttentionOptions = PLAIN,
) -> None:
    """Writes the attention of rows ``first_row`` to B; see `reference.paged_attention`.

    ``max_query_len`` is at least the longest row's number of queries. The tokens of other rows
    are left alone in ``out``, which is contiguous.
    """
    num_rows = len(seq_lens_B) - first_row
    if num_rows == 0 or max_query_len == 0:
        return
    num_heads, head_size = q_THD.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    config = launch_config(
        "prefill",
        head_size=head_size,
        dtype=q_THD.dtype,
        capability=device_capability(q_THD.device),
        cache_dtype=k_cache.dtype,
    )
    scale_log2, cap_scale = capped_scales(
        scale * loaded_scale(k_cache, options.k_scale), soft_cap=options.soft_cap
    )
    window = 0 if options.window is None else options.window
    grid = (triton.cdiv(max_query_len * group, config.block_m), num_kv_heads, num_rows)
    prefill_kernel[grid](
        q_THD,
        cache_view(k_cache),
        cache_view(v_cache),
        out_THD,
        block_tables_BM,
        seq_lens_B,
        query_starts_B1,
        scale_log2,
        cap_scale,
        loaded_scale(v_cache, options.v_scale),
        window,
        q_THD.stride(0),
        block_tables_BM.stride(0),
        first_row,
        num_kv_heads,
        block_shift(k_cache),
        GROUP=group,
        HEAD_SIZE=head_size,
        **config.tile(),
        BLOCK_D=triton.next_power_of_2(head_size),
        WINDOWED=window > 0,
        CAPPED=options.soft_cap is not None,
        **config.options(),
    )


# What changes from step to step is not specialised: a new value must not compile a kernel while
# requests wait. The strides of q are the model's, and that they are aligned speeds its loads.
@triton.jit(
    do_not_specialize=["window", "table_stride", "first_row", "num_kv_heads", "block_shift"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_starts_ptr"],
)
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    scale_log2,
    cap_scale,
    v_scale,
    window,
    q_stride,
    table_stride,
    first_row,
    num_kv_heads,
    block_shift,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    # The last tiles of a prompt see most tokens: start them first, or they are the tail.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = first_row + tl.program_id(2)
    query_start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - query_start
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    context = seq_len - num_queries
    block_table = table_ptr + row.to(tl.int64) * table_stride

    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    channels = tl.arange(0, BLOCK_D)
    inside = (queries < num_queries)[:, None] & (channels < HEAD_SIZE)[None, :]
    tokens = (query_start + queries).to(tl.int64)
    q_offsets = (tokens * q_stride + heads * HEAD_SIZE)[:, None] + channels[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    positions = context + queries
    # Every query of the tile sees all tokens before `full`, none sees `end` or later.
    first_query = tile * BLOCK_M // GROUP
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    full = (context + first_query + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:  # and then every tile is masked
        full = tl.maximum(context + first_query + 1 - window, 0) // BLOCK_N * BLOCK_N
    end = context + last_query + 1
    for start in tl.range(0, 0 if WINDOWED else full, BLOCK_N):
        k = load_kv_tile(
            k_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        v = load_kv_tile(
            v_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, row_max, row_sum = attend_tile(
            q, k, v, acc, row_max, row_sum, None, scale_log2, cap_scale,
            MASKED=False, WINDOWED=False, CAPPED=CAPPED,
        )  # fmt: skip
    for start in tl.range(full, end, BLOCK_N):
        k = load_kv_tile(
            k_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        v = load_kv_tile(
            v_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        kv_tokens = (start + tl.arange(0, BLOCK_N))[None, :]
        visible = kv_tokens <= positions[:, None]
        if WINDOWED:
            visible &= kv_tokens > positions[:, None] - window
        acc, row_max, row_sum = attend_tile(
            q, k, v, acc, row_max, row_sum, visible, scale_log2, cap_scale,
            MASKED=True, WINDOWED=WINDOWED, CAPPED=CAPPED,
        )  # fmt: skip

    if WINDOWED:  # rows past the last query may see nothing
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    out = acc / row_sum[:, None] * v_scale
    out_offsets = (tokens * GROUP * num_kv_heads + heads)[:, None] * HEAD_SIZE + channels[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
