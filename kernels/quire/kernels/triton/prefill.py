"""Triton prefill attention: many queries of each sequence over its paged KV, cached context first.

A program handles `block_m` consecutive rows of one sequence and one KV head. A row is a (query,
head of the group) pair, so all heads that share KV share its loads, whatever their number.

The context is cut into splits of `PREFILL_SPLIT_TOKENS`, counted from token 0. Each split is
reduced from an empty state, and the splits' results are merged in their order. So a row's bits
depend on its position alone: not on the batch, not on how its prompt was chunked, and not on which
program reduced a split. If there are enough programs to fill a GPU, one program reduces all splits.
A few new tokens after a long cached prefix get one program per split, and a second kernel merges.
Both merge with `merge_part`.

Traffic of a sequence with Q queries and context L: q and the output once, K and V
``ceil(Q * G / block_m)`` times (from L2, as the tiles of one head run side by side); flops
``4 * H * D`` for every pair of a query and a token it sees. For each row and split of a context
of several, ``D + 2`` floats are written and read once, and by a program that does all splits
twice: 2 KiB for heads of 128, against the million flops of a row in a split of 2,048 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.triton.fp8 import loaded_scale, loaded_view
from quire.kernels.triton.launch import (
    PREFILL_MERGE_BLOCK,
    PREFILL_MERGE_OPTIONS,
    block_shift,
    capped_scales,
    device_capability,
    launch_config,
    prefill_parts,
    prefill_split,
)
from quire.kernels.triton.prefill_merge import (
    first_slot,
    load_part,
    merge_part,
    prefill_merge_kernel,
    store_out,
    store_part,
)
from quire.kernels.triton.tile import attend_tile, load_kv_tile

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads   D head size
# N kept states, [split, KV head, tile]


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
    max_seq_len: int,
    scale: float,
    options: AttentionOptions = PLAIN,
) -> None:
    """Writes the attention of rows ``first_row`` to B; see `paged_attention` in
    `quire.kernels.reference.paged`.

    ``max_query_len`` and ``max_seq_len`` are at least the longest row's number of queries and of
    tokens. Rows before ``first_row`` have at least one query; their tokens in ``out``, which is
    contiguous, are not written.
    """
    num_rows = len(seq_lens_B) - first_row
    if num_rows == 0 or max_query_len == 0:
        return
    num_heads, head_size = q_THD.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    capability = device_capability(q_THD.device)
    config = launch_config(
        "prefill",
        head_size=head_size,
        dtype=q_THD.dtype,
        capability=capability,
        cache_dtype=k_cache.dtype,
    )
    split = prefill_split(head_size=head_size, capability=capability, cache_dtype=k_cache.dtype)
    scale_log2, cap_scale = capped_scales(
        scale * loaded_scale(k_cache, options.k_scale), soft_cap=options.soft_cap
    )
    window = 0 if options.window is None else options.window
    lookahead = min(options.lookahead, max_seq_len)
    num_tiles = triton.cdiv(max_query_len * group, config.block_m)
    num_splits = triton.cdiv(max_seq_len, split)
    num_parts = prefill_parts(num_tiles * num_kv_heads * num_rows, num_splits=num_splits)
    # Each tile of each row has a slot of its own, with the rows of the tile.
    num_slots = (len(q_THD) - first_row) * group // config.block_m + num_rows
    # A program for all splits keeps two states: the merged one, and the one to merge next.
    num_kept = max(num_parts, 2) * num_kv_heads * num_slots if num_splits > 1 else 0
    block_d = triton.next_power_of_2(head_size)
    device = q_THD.device
    shape = (num_kept, config.block_m)
    parts_NMD = torch.empty(*shape, block_d, dtype=torch.float32, device=device)
    # The maximum (in powers of 2) and the sum of each part's weights.
    stats_NM2 = torch.empty(*shape, 2, dtype=torch.float32, device=device)
    prefill_kernel[(num_tiles * num_parts, num_kv_heads, num_rows)](
        q_THD,
        loaded_view(k_cache),
        loaded_view(v_cache),
        out_THD,
        parts_NMD,
        stats_NM2,
        block_tables_BM,
        seq_lens_B,
        query_starts_B1,
        scale_log2,
        cap_scale,
        loaded_scale(v_cache, options.v_scale),
        window,
        lookahead,
        q_THD.stride(0),
        block_tables_BM.stride(0),
        first_row,
        num_kv_heads,
        block_shift(k_cache),
        num_slots,
        num_parts,
        GROUP=group,
        HEAD_SIZE=head_size,
        **config.tile(),
        BLOCK_D=block_d,
        SPLIT=split,
        MERGE_M=PREFILL_MERGE_BLOCK,
        KEPT=num_splits > 1,
        WINDOWED=window > 0,
        CAPPED=options.soft_cap is not None,
        **(config.kept_options() if num_splits > 1 else config.options()),
    )
    if num_parts > 1:
        num_blocks = triton.cdiv(max_query_len * group, PREFILL_MERGE_BLOCK)
        prefill_merge_kernel[(num_blocks, num_kv_heads, num_rows)](
            out_THD,
            parts_NMD,
            stats_NM2,
            seq_lens_B,
            query_starts_B1,
            loaded_scale(v_cache, options.v_scale),
            window,
            lookahead,
            first_row,
            num_kv_heads,
            num_slots,
            GROUP=group,
            HEAD_SIZE=head_size,
            BLOCK_M=PREFILL_MERGE_BLOCK,
            TILE_M=config.block_m,
            BLOCK_D=block_d,
            SPLIT=split,
            WINDOWED=window > 0,
            **PREFILL_MERGE_OPTIONS,
        )


# Arguments that change between steps are not specialised, so that no new value compiles a kernel
# while requests wait. The strides of q are fixed by the model, and their alignment speeds loads.
@triton.jit(
    do_not_specialize=[
        *("window", "lookahead", "table_stride", "first_row", "num_kv_heads", "block_shift"),
        *("num_slots", "num_parts"),
    ],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_starts_ptr"],
)
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    table_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    scale_log2,
    cap_scale,
    v_scale,
    window,
    lookahead,
    q_stride,
    table_stride,
    first_row,
    num_kv_heads,
    block_shift,
    num_slots,
    num_parts,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE_M: tl.constexpr,
    KEPT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    # The last tiles of a prompt attend to most tokens; started last, they would be the tail.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_parts
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

    positions = context + queries
    ends = tl.minimum(positions + lookahead, seq_len - 1) + 1
    # Every query of the tile attends to all tokens before `full`, none to `end` or later.
    first_query = tile * BLOCK_M // GROUP
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    begin = 0
    full = tl.minimum(context + first_query + lookahead + 1, seq_len) // BLOCK_N * BLOCK_N
    if WINDOWED:  # and then every tile is masked
        begin = tl.maximum(context + first_query + 1 - window, 0) // BLOCK_N * BLOCK_N
        full = 0
    end = tl.minimum(context + last_query + lookahead + 1, seq_len)
    if KEPT:
        split = begin // SPLIT
        end_split = (end + SPLIT - 1) // SPLIT
        if num_parts > 1:
            part = (tl.num_programs(0) - 1 - tl.program_id(0)) % num_parts
            if (part < split) | (part >= end_split):
                return
            split = part
            end_split = part + 1
        slot = first_slot(query_start - tl.load(query_starts_ptr + first_row), GROUP, BLOCK_M)
        kept = (kv_head * num_slots + slot + tile).to(tl.int64) * BLOCK_M
        num_kept = num_slots.to(tl.int64) * num_kv_heads * BLOCK_M
        first_split = split
        while split < end_split:
            acc, row_max, row_sum = attend_split(
                q, k_ptr, v_ptr, block_table, tl.maximum(split * SPLIT, begin), full,
                tl.minimum((split + 1) * SPLIT, end), positions, ends, seq_len, window, kv_head,
                num_kv_heads, block_shift, scale_log2, cap_scale,
                HEAD_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, KEPT, WINDOWED, CAPPED,
            )  # fmt: skip
            part = split if num_parts > 1 else tl.minimum(split - first_split, 1)
            store_part(
                parts_ptr, stats_ptr, kept + part * num_kept, acc, row_max, row_sum,
                BLOCK_M, BLOCK_D,
            )  # fmt: skip
            if (num_parts == 1) & ((split > first_split) | (split + 1 == end_split)):
                tl.debug_barrier()  # a thread reads what others have written
                for first in tl.range(0, BLOCK_M, MERGE_M, num_stages=1):
                    kept_acc, kept_max, kept_sum = load_part(
                        parts_ptr, stats_ptr, kept + first, MERGE_M, BLOCK_D
                    )
                    if split > first_split:
                        part_acc, part_max, part_sum = load_part(
                            parts_ptr, stats_ptr, num_kept + kept + first, MERGE_M, BLOCK_D
                        )
                        kept_acc, kept_max, kept_sum = merge_part(
                            kept_acc, kept_max, kept_sum, part_acc, part_max, part_sum
                        )
                    if split + 1 < end_split:
                        store_part(
                            parts_ptr, stats_ptr, kept + first, kept_acc, kept_max, kept_sum,
                            MERGE_M, BLOCK_D,
                        )  # fmt: skip
                    else:
                        store_out(
                            out_ptr, query_start, num_queries, tile * BLOCK_M + first, kv_head,
                            num_kv_heads, kept_acc, kept_sum, v_scale,
                            GROUP, HEAD_SIZE, MERGE_M, BLOCK_D,
                        )  # fmt: skip
                tl.debug_barrier()
            split += 1
    else:
        acc, row_max, row_sum = attend_split(
            q, k_ptr, v_ptr, block_table, begin, full, end, positions, ends, seq_len, window,
            kv_head, num_kv_heads, block_shift, scale_log2, cap_scale,
            HEAD_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, KEPT, WINDOWED, CAPPED,
        )  # fmt: skip
        store_out(
            out_ptr, query_start, num_queries, tile * BLOCK_M, kv_head,
            num_kv_heads, acc, row_sum, v_scale, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
        )  # fmt: skip


@triton.jit
def attend_split(
    q,
    k_ptr,
    v_ptr,
    block_table,
    begin,
    full,
    end,
    positions,
    ends,
    seq_len,
    window,
    kv_head,
    num_kv_heads,
    block_shift,
    scale_log2,
    cap_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEPT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The state of rows over the tokens ``begin`` to ``end`` (exclusive), from an empty state."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    masked = full
    if WINDOWED:
        masked = begin
    elif KEPT:
        masked = tl.maximum(tl.minimum(full, end), begin)
    for start in tl.range(begin, masked, BLOCK_N):
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
    for start in tl.range(masked, end, BLOCK_N):
        k = load_kv_tile(
            k_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        v = load_kv_tile(
            v_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        kv_tokens = (start + tl.arange(0, BLOCK_N))[None, :]
        visible = kv_tokens < ends[:, None]
        if WINDOWED:
            visible &= kv_tokens > positions[:, None] - window
        # A tile's first queries may not attend to its last split.
        acc, row_max, row_sum = attend_tile(
            q, k, v, acc, row_max, row_sum, visible, scale_log2, cap_scale,
            MASKED=True, WINDOWED=WINDOWED or KEPT, CAPPED=CAPPED,
        )  # fmt: skip
    return acc, row_max, row_sum
