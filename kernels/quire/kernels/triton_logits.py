"""Triton logits processing: penalties and bans on a few tokens of some rows, in place.

A lane takes one (row, token) pair; the pairs are distinct, so none waits for another. Each
operation is rounded as its twin rounds it.

Traffic: 12 bytes a pair, and a read and a write of 4 bytes that lie anywhere: a step with 64 rows
and 2,000 seen tokens each moves some 10 MB, most of it in sectors of 32 bytes for 4.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import ADJUST_BLOCK, ELEMENTWISE_OPTIONS

# S rows that sample   V vocabulary   E pairs of a row and a token


def adjust_logits(
    logits_SV: Tensor,
    *,
    rows_E: Tensor,
    token_ids_E: Tensor,
    counts_E: Tensor,
    presence_S: Tensor,
    frequency_S: Tensor,
    repetition_S: Tensor,
) -> None:
    """`reference_sampling.adjust_logits`; rows of logits may lie apart."""
    num_pairs = len(rows_E)
    if num_pairs == 0:
        return
    adjust_kernel[(triton.cdiv(num_pairs, ADJUST_BLOCK),)](
        logits_SV,
        rows_E,
        token_ids_E,
        counts_E,
        presence_S,
        frequency_S,
        repetition_S,
        num_pairs,
        logits_SV.stride(0),
        BLOCK=ADJUST_BLOCK,
        **ELEMENTWISE_OPTIONS,
    )


# The number of pairs and where they lie change in every step.
@triton.jit(
    do_not_specialize=["num_pairs", "logits_stride"],
    do_not_specialize_on_alignment=[
        "rows_ptr", "token_ids_ptr", "counts_ptr", "presence_ptr", "frequency_ptr",
        "repetition_ptr",
    ],
)  # fmt: skip
def adjust_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    counts_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    num_pairs,
    logits_stride,
    BLOCK: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    rows = tl.load(rows_ptr + pairs, mask=inside, other=0)
    counts = tl.load(counts_ptr + pairs, mask=inside, other=0)
    token_ids = tl.load(token_ids_ptr + pairs, mask=inside, other=0)
    logits = logits_ptr + rows.to(tl.int64) * logits_stride + token_ids
    values = tl.load(logits, mask=inside, other=0.0)
    repetition = tl.load(repetition_ptr + rows, mask=inside, other=1.0)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    frequency = tl.load(frequency_ptr + rows, mask=inside, other=0.0)
    presence = tl.load(presence_ptr + rows, mask=inside, other=0.0)
    lowered = values - (frequency * counts.to(tl.float32) + presence)
    values = tl.where(counts > 0, lowered, values)
    values = tl.where(counts < 0, float("-inf"), values)
    tl.store(logits, values, mask=inside)
