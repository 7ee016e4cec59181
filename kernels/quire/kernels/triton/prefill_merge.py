"""The partial results of prefill attention over splits of a context, and how they are merged.

The state of a row after some tokens is the greatest score (in powers of 2), the sum of the weights
and their sum of V, all float32. Each tile of rows has a slot of its own, so that states are stored
and loaded without masks, which cost registers: ``[part, KV head, slot, row of the tile]``.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["window", "lookahead", "first_row", "num_kv_heads", "num_slots"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_starts_ptr"],
)
def prefill_merge_kernel(
    out_ptr,
    parts_ptr,
    stats_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    v_scale,
    window,
    lookahead,
    first_row,
    num_kv_heads,
    num_slots,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    kv_head = tl.program_id(1)
    row = first_row + tl.program_id(2)
    query_start = tl.load(query_starts_ptr + row)
    num_queries = tl.load(query_starts_ptr + row + 1) - query_start
    first_pair = tl.program_id(0) * BLOCK_M
    if first_pair >= num_queries * GROUP:
        return
    slot = first_slot(query_start - tl.load(query_starts_ptr + first_row), GROUP, TILE_M)
    kept = (kv_head * num_slots + slot).to(tl.int64) * TILE_M + first_pair
    num_kept = num_slots.to(tl.int64) * num_kv_heads * TILE_M
    queries = tl.minimum((first_pair + tl.arange(0, BLOCK_M)) // GROUP, num_queries - 1)
    seq_len = tl.load(seq_lens_ptr + row)
    positions = seq_len - num_queries + queries
    last = tl.minimum(positions + lookahead, seq_len - 1) // SPLIT
    first = tl.maximum(positions + 1 - window, 0) // SPLIT if WINDOWED else last * 0

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in tl.range(tl.min(first, 0), tl.max(last, 0) + 1):
        # A split to which no query of this row's tile attends was not stored.
        part_acc, part_max, part_sum = load_part(
            parts_ptr, stats_ptr, kept + split * num_kept, BLOCK_M, BLOCK_D
        )
        sees = (split >= first) & (split <= last)
        part_acc = tl.where(sees[:, None], part_acc, 0.0)
        part_max = tl.where(sees, part_max, float("-inf"))
        part_sum = tl.where(sees, part_sum, 0.0)
        acc, row_max, row_sum = merge_part(acc, row_max, row_sum, part_acc, part_max, part_sum)
    store_out(
        out_ptr, query_start, num_queries, first_pair, kv_head,
        num_kv_heads, acc, row_sum, v_scale, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
    )  # fmt: skip


@triton.jit
def first_slot(num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The slot of a row's first tile, after rows of ``num_tokens`` tokens in total. The rows' tiles
    are at most the tiles of that total plus one per row."""
    return num_tokens * GROUP // BLOCK_M + tl.program_id(2)


@triton.jit
def load_part(parts_ptr, stats_ptr, first, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads the state that was stored in the rows from ``first`` on."""
    rows = tl.arange(0, BLOCK_M)
    offsets = rows[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    acc = tl.load(parts_ptr + first * BLOCK_D + offsets)
    row_max = tl.load(stats_ptr + first * 2 + rows * 2)
    row_sum = tl.load(stats_ptr + first * 2 + rows * 2 + 1)
    return acc, row_max, row_sum


@triton.jit
def store_part(
    parts_ptr,
    stats_ptr,
    first,
    acc,
    row_max,
    row_sum,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_M)
    offsets = rows[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(parts_ptr + first * BLOCK_D + offsets, acc)
    tl.store(stats_ptr + first * 2 + rows * 2, row_max)
    tl.store(stats_ptr + first * 2 + rows * 2 + 1, row_sum)


@triton.jit
def merge_part(acc, row_max, row_sum, part_acc, part_max, part_sum):
    """Merges one more split into the state of rows. A split to which a row does not attend leaves
    its state unchanged, to the bit; the first one to which it attends replaces an empty state."""
    new_max = tl.maximum(row_max, part_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf is NaN
    decay = tl.exp2(row_max - base)
    share = tl.exp2(part_max - base)
    acc = tl.fma(acc, decay[:, None], part_acc * share[:, None])
    return acc, new_max, tl.fma(row_sum, decay, part_sum * share)


@triton.jit
def store_out(
    out_ptr,
    query_start,
    num_queries,
    first_pair,
    kv_head,
    num_kv_heads,
    acc,
    row_sum,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # rows past the last query may see nothing
    out = acc / row_sum[:, None] * v_scale
    pairs = first_pair + tl.arange(0, BLOCK_M)
    queries = pairs // GROUP
    channels = tl.arange(0, BLOCK_D)
    tokens = (query_start + queries).to(tl.int64)
    heads = (tokens * num_kv_heads + kv_head) * GROUP + pairs % GROUP
    inside = (queries < num_queries)[:, None] & (channels < HEAD_SIZE)[None, :]
    offsets = heads[:, None] * HEAD_SIZE + channels[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
