"""One step of attention in Triton: a tile of queries with a tile of paged KV.

The decode and the prefill kernel share it, and KV is read nowhere else. These rules make a row's
bits depend on the row alone:

- tiles of KV are counted from token 0 and processed in order;
- a masked token adds exact zeros (weight 2^-inf), so a tile without a visible token leaves a row
  unchanged;
- a product that is added to a sum uses `fma` explicitly: the compiler could otherwise fuse the two
  in one loop and not in another.

Tokens past the sequence's end are never loaded: such slots may hold NaN, and 0 * NaN is NaN.
"""

import triton
import triton.language as tl

from quire.kernels.triton.fp8 import from_e4m3


@triton.jit
def load_kv_tile(
    cache,
    block_table,
    start,
    seq_len,
    kv_head,
    num_kv_heads,
    block_shift,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loads tokens ``start`` to ``start + BLOCK_N`` of one KV head, ``[BLOCK_N, BLOCK_D]``, 0 past
    the sequence's end and the head's. Bytes are float8, see `triton_fp8`."""
    tokens = start + tl.arange(0, BLOCK_N)
    present = tokens < seq_len
    blocks = tl.load(block_table + (tokens >> block_shift), mask=present, other=0).to(tl.int64)
    # int64: a cache of 2^31 elements is 4 GiB of bfloat16.
    slots = (blocks << block_shift) + (tokens & ((1 << block_shift) - 1))
    rows = (slots * num_kv_heads + kv_head) * HEAD_SIZE
    channels = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (channels < HEAD_SIZE)[None, :]
    values = tl.load(cache + rows[:, None] + channels[None, :], mask=inside, other=0.0)
    if cache.dtype.element_ty == tl.uint8:
        return from_e4m3(values)
    else:
        return values


@triton.jit
def attend_tile(
    q,
    k,
    v,
    acc,
    row_max,
    row_sum,
    visible,
    scale_log2,
    cap_scale,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Online softmax over one tile of KV, in powers of 2.

    ``q`` is ``[BLOCK_M, BLOCK_D]``, ``k`` and ``v`` ``[BLOCK_N, BLOCK_D]``; ``acc``, ``row_max``
    and ``row_sum`` are the float32 state of the rows, and the updated state is returned.
    ``visible`` is read only if ``MASKED``. Each row has a visible token in its first tile, unless
    ``WINDOWED``. If ``CAPPED``, scores become tanh of half of ``cap_scale`` (in powers of 2) times
    themselves, and ``scale_log2`` includes the cap.
    """
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_scale))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    base = new_max
    if WINDOWED:  # -inf - -inf is NaN
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
    decay = tl.exp2(row_max - base)
    row_sum = tl.fma(row_sum, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
