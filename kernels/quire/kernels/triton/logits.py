"""Triton logits processing: applies bias, penalties and masks to some rows' logits, in place.

Bias and penalties: a lane handles one (row, token) pair; the pairs of a kind are distinct, so none
waits for another. Masks: a program handles a tile of one row. Each operation rounds as its twin
does.

Traffic: 12 bytes a pair, and a random read and write of 4 bytes: a step with 64 rows
and 2,000 seen tokens each moves some 10 MB, most of it in sectors of 32 bytes for 4. A masked row
costs 1 bit and a write of 4 bytes for each token that it bans.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import ADJUST_BLOCK, ELEMENTWISE_OPTIONS, MASK_BLOCK

# S samples   V vocabulary   A biased and E seen pairs of a sample and a token   K masked samples
# W words of 32 tokens


def adjust_logits(
    logits_SV: Tensor,
    *,
    biased_rows_A: Tensor,
    biased_ids_A: Tensor,
    bias_A: Tensor,
    seen_rows_E: Tensor,
    seen_ids_E: Tensor,
    seen_counts_E: Tensor,
    presence_S: Tensor,
    frequency_S: Tensor,
    repetition_S: Tensor,
    masked_rows_K: Tensor,
    mask_KW: Tensor,
) -> None:
    """`reference_sampling.adjust_logits`; only each row of logits must be contiguous."""
    stride = logits_SV.stride(0)
    if num_biased := len(biased_rows_A):
        bias_kernel[(triton.cdiv(num_biased, ADJUST_BLOCK),)](
            logits_SV,
            biased_rows_A,
            biased_ids_A,
            bias_A,
            num_biased,
            stride,
            BLOCK=ADJUST_BLOCK,
            **ELEMENTWISE_OPTIONS,
        )
    if num_seen := len(seen_rows_E):
        adjust_kernel[(triton.cdiv(num_seen, ADJUST_BLOCK),)](
            logits_SV,
            seen_rows_E,
            seen_ids_E,
            seen_counts_E,
            presence_S,
            frequency_S,
            repetition_S,
            num_seen,
            stride,
            BLOCK=ADJUST_BLOCK,
            **ELEMENTWISE_OPTIONS,
        )
    if num_masked := len(masked_rows_K):
        vocab_size = logits_SV.shape[1]
        mask_kernel[(num_masked, triton.cdiv(vocab_size, MASK_BLOCK))](
            logits_SV,
            masked_rows_K,
            mask_KW,
            vocab_size,
            mask_KW.shape[1],
            stride,
            BLOCK=MASK_BLOCK,
            **ELEMENTWISE_OPTIONS,
        )


# The number of pairs and their addresses change in every step.
@triton.jit(
    do_not_specialize=["num_pairs", "logits_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "token_ids_ptr", "bias_ptr"],
)
def bias_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    bias_ptr,
    num_pairs,
    logits_stride,
    BLOCK: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    rows = tl.load(rows_ptr + pairs, mask=inside, other=0)
    token_ids = tl.load(token_ids_ptr + pairs, mask=inside, other=0)
    bias = tl.load(bias_ptr + pairs, mask=inside, other=0.0)
    logits = logits_ptr + rows.to(tl.int64) * logits_stride + token_ids
    values = tl.load(logits, mask=inside, other=0.0)
    tl.store(logits, values + bias, mask=inside)


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
    tl.store(logits, tl.where(counts > 0, lowered, values), mask=inside)


@triton.jit(
    do_not_specialize=["vocab_size", "num_words", "logits_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "mask_ptr"],
)
def mask_kernel(
    logits_ptr,
    rows_ptr,
    mask_ptr,
    vocab_size,
    num_words,
    logits_stride,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = token_ids // 32
    masks = mask_ptr + index.to(tl.int64) * num_words
    bits = tl.load(masks + words, mask=words < num_words, other=0)
    banned = ((bits >> (token_ids % 32)) & 1) == 0
    logits = logits_ptr + row * logits_stride + token_ids
    tl.store(logits, float("-inf"), mask=banned & (token_ids < vocab_size))
