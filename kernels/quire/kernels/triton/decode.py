"""Triton decode attention: one query per sequence over its paged KV, with the context split.

A program handles `SPLIT_TOKENS` tokens of one sequence and up to 16 query heads of one KV head (one
tile, so their KV is read once), and stores a partial result; a second kernel merges a head's
partial results, `MERGE_BLOCK` at a time. Splits are counted from token 0 and their size is fixed,
so a row's bits depend on the row alone: not on the batch, not on the longest sequence, not on
whether rows that share a split read it together (`triton_shared`).

Traffic: K and V of every sequence once, ``2 * L * K * D`` elements each, and per split and head
``D + 2`` floats written and read again. At 1 to 2 flops per byte, memory alone sets its speed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.shared_prefix import SharedSplits
from quire.kernels.triton.fp8 import loaded_scale, loaded_view
from quire.kernels.triton.launch import (
    MERGE_BLOCK,
    MERGE_OPTIONS,
    SPLIT_TOKENS,
    block_shift,
    capped_scales,
    device_capability,
    launch_config,
)
from quire.kernels.triton.shared import shared_kernel
from quire.kernels.triton.tile import attend_tile, load_kv_tile

# B sequences   M blocks of the longest   H query heads   D head size   P splits of the longest


def decode_attention(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_BHD: Tensor,
    *,
    block_tables_BM: Tensor,
    seq_lens_B: Tensor,
    max_seq_len: int,
    scale: float,
    options: AttentionOptions = PLAIN,
    shared: SharedSplits | None = None,
) -> None:
    """Writes each row's attention of one query over ``seq_len`` tokens.

    ``max_seq_len`` is at least the longest length; a row of length 0 gets zeros. ``out`` is
    contiguous; ``block_tables`` and ``seq_lens`` may hold further rows. ``shared`` has the rows
    that read the same blocks, none of which a window may exclude.
    """
    num_rows, num_heads, head_size = q_BHD.shape
    if num_rows == 0:
        return
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    config = launch_config(
        "decode",
        head_size=head_size,
        dtype=q_BHD.dtype,
        capability=device_capability(q_BHD.device),
        cache_dtype=k_cache.dtype,
    )
    block_d = triton.next_power_of_2(head_size)
    num_splits = max(1, triton.cdiv(max_seq_len, SPLIT_TOKENS))
    parts_BHPD = torch.empty(
        num_rows, num_heads, num_splits, head_size, dtype=torch.float32, device=q_BHD.device
    )
    # The maximum (in powers of 2) and the sum of each part's weights.
    stats_BHP2 = torch.empty(
        num_rows, num_heads, num_splits, 2, dtype=torch.float32, device=q_BHD.device
    )
    scale_log2, cap_scale = capped_scales(
        scale * loaded_scale(k_cache, options.k_scale), soft_cap=options.soft_cap
    )
    window = 0 if options.window is None else options.window
    assert shared is None or window == 0, "rows in a window share no split as a whole"
    tiles_per_group = triton.cdiv(group, config.block_m)
    decode_kernel[(num_rows, num_kv_heads * tiles_per_group, num_splits)](
        q_BHD,
        loaded_view(k_cache),
        loaded_view(v_cache),
        parts_BHPD,
        stats_BHP2,
        block_tables_BM,
        seq_lens_B,
        seq_lens_B if shared is None else shared.num_splits_B,
        scale_log2,
        cap_scale,
        window,
        q_BHD.stride(0),
        block_tables_BM.stride(0),
        num_kv_heads,
        block_shift(k_cache),
        GROUP=group,
        HEAD_SIZE=head_size,
        **config.tile(),
        BLOCK_D=block_d,
        SPLIT=SPLIT_TOKENS,
        WINDOWED=window > 0,
        CAPPED=options.soft_cap is not None,
        SHARED=shared is not None,
        **config.options(),
    )
    if shared is not None:
        shared_kernel[(len(shared.splits_X), num_kv_heads)](
            q_BHD,
            loaded_view(k_cache),
            loaded_view(v_cache),
            parts_BHPD,
            stats_BHP2,
            block_tables_BM,
            shared.rows_XR,
            shared.splits_X,
            scale_log2,
            cap_scale,
            q_BHD.stride(0),
            block_tables_BM.stride(0),
            num_kv_heads,
            block_shift(k_cache),
            num_splits,
            GROUP=group,
            HEAD_SIZE=head_size,
            **config.tile(),
            BLOCK_D=block_d,
            SPLIT=SPLIT_TOKENS,
            CAPPED=options.soft_cap is not None,
            **config.shared_options(is_float8=k_cache.dtype == torch.float8_e4m3fn),
        )
    merge(
        parts_BHPD,
        stats_BHP2,
        out_BHD,
        seq_lens_B=seq_lens_B,
        v_scale=loaded_scale(v_cache, options.v_scale),
        window=window,
    )


def merge(
    parts_BHPD: Tensor,
    stats_BHP2: Tensor,
    out_BHD: Tensor,
    *,
    seq_lens_B: Tensor,
    v_scale: float,
    window: int = 0,
) -> None:
    """Merges each head's partial results: float32 sums of V, each with the maximum of its scores
    (in powers of 2) and the sum of its weights."""
    num_rows, num_heads, max_splits, head_size = parts_BHPD.shape
    merge_kernel[(num_rows, num_heads)](
        parts_BHPD,
        stats_BHP2,
        out_BHD,
        seq_lens_B,
        max_splits,
        v_scale,
        window,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_P=MERGE_BLOCK,
        SPLIT=SPLIT_TOKENS,
        WINDOWED=window > 0,
        **MERGE_OPTIONS,
    )


# Arguments that change between steps are not specialised, so that no new value compiles a kernel
# while requests wait. The strides of q are fixed by the model, and their alignment speeds loads.
@triton.jit(
    do_not_specialize=["window", "table_stride", "num_kv_heads", "block_shift"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "shared_ptr"],
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,
    stats_ptr,
    table_ptr,
    seq_lens_ptr,
    shared_ptr,
    scale_log2,
    cap_scale,
    window,
    q_stride,
    table_stride,
    num_kv_heads,
    block_shift,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARED: tl.constexpr,
):
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // TILES
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    if split * SPLIT >= seq_len:
        return
    if SHARED:  # noqa: SIM102 (a constant combined with a variable would be computed)
        # `triton_shared` reads this split for the row, together with others.
        if split < tl.load(shared_ptr + row):
            return
    begin = split * SPLIT
    first = tl.maximum(seq_len - window, 0) if WINDOWED else 0
    if WINDOWED:
        if begin + SPLIT <= first:
            return
        begin = tl.maximum(begin, first // BLOCK_N * BLOCK_N)
    block_table = table_ptr + row * table_stride

    members = tl.program_id(1) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + members
    channels = tl.arange(0, BLOCK_D)
    present = members < GROUP
    inside = present[:, None] & (channels < HEAD_SIZE)[None, :]
    q_offsets = row * q_stride + heads[:, None] * HEAD_SIZE + channels[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    end = tl.minimum(seq_len, (split + 1) * SPLIT)
    for start in tl.range(begin, end, BLOCK_N):
        k = load_kv_tile(
            k_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        v = load_kv_tile(
            v_ptr, block_table, start, seq_len, kv_head, num_kv_heads, block_shift,
            HEAD_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        tokens = start + tl.arange(0, BLOCK_N)
        visible = (tokens < seq_len)[None, :]
        if WINDOWED:
            visible &= (tokens >= first)[None, :]
        acc, row_max, row_sum = attend_tile(
            q, k, v, acc, row_max, row_sum, visible, scale_log2, cap_scale,
            MASKED=True, WINDOWED=False, CAPPED=CAPPED,
        )  # fmt: skip

    num_heads = num_kv_heads * GROUP
    parts = (row * num_heads + heads) * tl.num_programs(2) + split
    tl.store(parts_ptr + parts[:, None] * HEAD_SIZE + channels[None, :], acc, mask=inside)
    tl.store(stats_ptr + parts * 2, row_max, mask=present)
    tl.store(stats_ptr + parts * 2 + 1, row_sum, mask=present)


@triton.jit(
    do_not_specialize=["max_splits", "window"], do_not_specialize_on_alignment=["seq_lens_ptr"]
)
def merge_kernel(
    parts_ptr,
    stats_ptr,
    out_ptr,
    seq_lens_ptr,
    max_splits,
    v_scale,
    window,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row * tl.num_programs(1) + tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    num_splits = (seq_len + SPLIT - 1) // SPLIT
    first_split = tl.maximum(seq_len - window, 0) // SPLIT if WINDOWED else 0
    stats = stats_ptr + head * max_splits * 2
    parts = parts_ptr + head * max_splits * HEAD_SIZE
    places = tl.arange(0, BLOCK_P)
    channels = tl.arange(0, BLOCK_D)
    inside = channels < HEAD_SIZE
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    row_max = float("-inf")
    row_sum = 0.0
    for start in tl.range(first_split, num_splits, BLOCK_P):
        splits = start + places
        present = splits < num_splits
        values = tl.load(
            parts + splits[:, None] * HEAD_SIZE + channels[None, :],
            mask=present[:, None] & inside[None, :],
            other=0.0,
        )
        part_max = tl.load(stats + splits * 2, mask=present, other=float("-inf"))
        part_sum = tl.load(stats + splits * 2 + 1, mask=present, other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        decay = tl.exp2(row_max - new_max)
        share = tl.exp2(part_max - new_max)
        row_sum = tl.fma(row_sum, decay, tl.sum(part_sum * share, 0))
        acc = tl.fma(acc, decay, tl.sum(values * share[:, None], 0))
        row_max = new_max
    out = acc / tl.where(row_sum > 0, row_sum, 1.0) * v_scale  # a row of length 0 gives zeros
    out_offsets = head * HEAD_SIZE + channels
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
