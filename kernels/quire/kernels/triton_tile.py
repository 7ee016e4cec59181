"""One step of attention in Triton: a tile of queries meets a tile of paged KV.

Shared by the decode and the prefill kernel, and the only place where KV is read. Rules that make
a row's bits depend on the row alone:

- tiles of KV are counted from token 0 and taken in order;
- a token that a row must not see adds exact zeros (weight 2^-inf), so a tile in which a row sees
  nothing leaves it as it was;
- where a product meets a sum, `fma` says so: the compiler could otherwise fuse the two in one
  loop and not in another.

Tokens past the sequence's end are never loaded: such slots may hold NaN, and 0 * NaN is NaN.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


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
    """Tokens ``start`` to ``start + BLOCK_N`` of one KV head, ``[BLOCK_N, BLOCK_D]``, 0 past the
    sequence's end and the head's."""
    tokens = start + tl.arange(0, BLOCK_N)
    present = tokens < seq_len
    blocks = tl.load(block_table + (tokens >> block_shift), mask=present, other=0).to(tl.int64)
    # int64: a cache of 2^31 elements is 4 GiB of bfloat16.
    slots = (blocks << block_shift) + (tokens & ((1 << block_shift) - 1))
    rows = (slots * num_kv_heads + kv_head) * HEAD_SIZE
    channels = tl.arange(0, BLOCK_D)
    inside = present[:, None] & (channels < HEAD_SIZE)[None, :]
    return tl.load(cache + rows[:, None] + channels[None, :], mask=inside, other=0.0)


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
    MASKED: tl.constexpr,
):
    """Online softmax over one tile of KV, in powers of 2.

    ``q`` is ``[BLOCK_M, BLOCK_D]``, ``k`` and ``v`` ``[BLOCK_N, BLOCK_D]``; ``acc``, ``row_max``
    and ``row_sum`` are the float32 state of the rows, returned renewed. ``visible`` is read only
    where ``MASKED``. Each row has seen a token by the end of its first tile.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(tl.fma(scores, scale_log2, -new_max[:, None]))
    decay = tl.exp2(row_max - new_max)
    row_sum = tl.fma(row_sum, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum
