"""Triton decode attention over context that several rows share, whose KV is read once for all.

A program handles one split of the context and as many rows as fit a tile with their query heads of
one KV head. For each (row, head) pair it computes the same as `triton_decode.decode_kernel`, in a
tile of the same shape and in the same order, and stores the same partial result. So sharing does
not change a bit. `triton_decode` handles unshared splits and the merge.

Traffic: K and V of a split once per program, ``2 * SPLIT * D`` elements, from memory for the
first program of the split and from the level-2 cache for the others.
"""

import triton
import triton.language as tl

from quire.kernels.triton.tile import attend_tile, load_kv_tile


@triton.jit(
    do_not_specialize=["table_stride", "num_kv_heads", "block_shift", "max_splits"],
    do_not_specialize_on_alignment=["table_ptr", "rows_ptr", "splits_ptr"],
)
def shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,
    stats_ptr,
    table_ptr,
    rows_ptr,
    splits_ptr,
    scale_log2,
    cap_scale,
    q_stride,
    table_stride,
    num_kv_heads,
    block_shift,
    max_splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.load(splits_ptr + item)
    block_table = table_ptr + tl.load(rows_ptr + item * ROWS).to(tl.int64) * table_stride

    pairs = tl.arange(0, BLOCK_M)
    places = pairs // GROUP
    rows = tl.load(rows_ptr + item * ROWS + places, mask=places < ROWS, other=-1).to(tl.int64)
    present = rows >= 0
    heads = kv_head * GROUP + pairs % GROUP
    channels = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (channels < HEAD_SIZE)[None, :]
    q_offsets = (rows * q_stride + heads * HEAD_SIZE)[:, None] + channels[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    end = (split + 1) * SPLIT
    for start in tl.range(split * SPLIT, end, BLOCK_N):
        k = load_kv_tile(
            k_ptr, block_table, start, end, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        v = load_kv_tile(
            v_ptr, block_table, start, end, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        visible = (start + tl.arange(0, BLOCK_N) < end)[None, :]
        acc, row_max, row_sum = attend_tile(
            q, k, v, acc, row_max, row_sum, visible, scale_log2, cap_scale,
            MASKED=True, WINDOWED=False, CAPPED=CAPPED,
        )  # fmt: skip

    parts = (rows * (num_kv_heads * GROUP) + heads) * max_splits + split
    tl.store(parts_ptr + parts[:, None] * HEAD_SIZE + channels[None, :], acc, mask=inside)
    tl.store(stats_ptr + parts * 2, row_max, mask=present)
    tl.store(stats_ptr + parts * 2 + 1, row_sum, mask=present)
