"""Triton sampling: from logits to tokens on the device, without a sort and without a copy to the
host.

A program takes one row. Top-k, min-p and top-p each keep the best tokens of a row in the order
(logit, then lowest id), so what is kept is a prefix of that order: a least logit and, among the
tokens of just that logit, an end of their ids. The least logit is found by bisection over the
logits' bit patterns, where each try moves both ends to logits that are there.

Sums are of integer weights, so that no order of summation can change a draw; the random number
is a hash of (seed, position). A row's token depends on its logits and parameters only.

Traffic: a greedy row is read once, one without limits three times, and a limit reads it some 20
times more, from the level-2 cache where the logits of all rows fit it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import SAMPLE_BLOCK, SAMPLE_OPTIONS
from quire.kernels.triton_sample_tile import (
    first_best,
    key_of,
    load_tile,
    random_uniform,
    value_of,
    weights_of,
)

# S rows that sample   V vocabulary

LN_2 = tl.constexpr(math.log(2))


def sample(
    logits_SV: Tensor,
    *,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
) -> Tensor:
    """`reference_sampling.sample`: float32 logits, parameters on their device; int64 ids there."""
    num_rows, vocab_size = logits_SV.shape
    token_ids_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if num_rows == 0:
        return token_ids_S
    sample_kernel[(num_rows,)](
        logits_SV,
        temperature_S,
        top_k_S,
        top_p_S,
        temperature_S.double() * min_p_S.double().log(),
        seed_S,
        position_S,
        token_ids_S,
        vocab_size,
        logits_SV.stride(0),
        BLOCK=SAMPLE_BLOCK,
        **SAMPLE_OPTIONS,
    )
    return token_ids_S


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "drop_ptr", "seed_ptr", "position_ptr",
        "token_ids_ptr",
    ]
)  # fmt: skip
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    drop_ptr,
    seed_ptr,
    position_ptr,
    token_ids_ptr,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * logits_stride
    least, best, token = first_best(logits, vocab_size, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        best_value = value_of(best)
        divisor = temperature * LN_2
        floor = best_value.to(tl.float64) + tl.load(drop_ptr + row)
        # Kept are the tokens of a key above `last`, and those of that key with an id below `end`.
        last, end = least, vocab_size
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab_size):
            last, above = search(
                logits, vocab_size, least, best, top_k.to(tl.int64),
                last, end, floor, best_value, divisor, True, BLOCK,
            )  # fmt: skip
            end = end_of_ties(logits, vocab_size, last, top_k.to(tl.int64) - above, BLOCK)
        total, _, _ = amount_from(
            logits, vocab_size, last, last, end, floor, best_value, divisor, False, BLOCK
        )
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        if top_p < 1:
            share = top_p * total.to(tl.float64)
            wanted = share.to(tl.int64)
            wanted += (wanted.to(tl.float64) < share).to(tl.int64)
            cut, above = search(
                logits, vocab_size, last, best, wanted,
                last, end, floor, best_value, divisor, False, BLOCK,
            )  # fmt: skip
            # At least 1 but where the logits are NaN.
            weight = tl.maximum(weights_of(value_of(cut), best_value, divisor), 1)
            num_ties = (wanted - above + weight - 1) // weight
            last, end = cut, end_of_ties(logits, vocab_size, cut, num_ties, BLOCK)
            total = above + num_ties * weight
        uniform = random_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        token = pick(logits, vocab_size, target, last, end, floor, best_value, divisor, BLOCK)
    tl.store(token_ids_ptr + row, token.to(tl.int64))


@triton.jit
def search(
    logits,
    vocab_size,
    low,
    high,
    wanted,
    last,
    end,
    floor,
    best_value,
    divisor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest key from which up the tokens amount to ``wanted``, and what lies above it.

    ``low`` and ``high`` are keys of tokens; from ``low`` up there is enough.
    """
    above = tl.zeros([], dtype=tl.int64)
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        amount, at_least, below = amount_from(
            logits, vocab_size, middle, last, end, floor, best_value, divisor, COUNTS, BLOCK
        )
        is_enough = amount >= wanted
        low = tl.where(is_enough, at_least, low)
        high = tl.where(is_enough, high, below)
        above = tl.where(is_enough, above, amount)
    return low, above


@triton.jit
def amount_from(
    logits,
    vocab_size,
    threshold,
    last,
    end,
    floor,
    best_value,
    divisor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many tokens there are from a key up, or what the kept ones among them weigh; and the
    keys of tokens that are next to the threshold, from it up and below it."""
    amount = tl.zeros([], dtype=tl.int64)
    at_least = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    below = tl.full([], -0x80000000, dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids, inside, values = load_tile(logits, start, vocab_size, BLOCK)
        keys = key_of(values)
        reached = inside & (keys >= threshold)
        at_least = tl.minimum(at_least, tl.min(tl.where(reached, keys, 0x7FFFFFFF), 0))
        missed = inside & (keys < threshold)
        below = tl.maximum(below, tl.max(tl.where(missed, keys, -0x80000000), 0))
        if COUNTS:
            amount += tl.sum(reached.to(tl.int32), 0)
        else:
            kept = reached & ((keys > last) | ((keys == last) & (ids < end)))
            kept &= values.to(tl.float64) >= floor
            weights = weights_of(values, best_value, divisor)
            amount += tl.sum(tl.where(kept, weights, 0), 0)
    return amount, at_least, below


@triton.jit
def end_of_ties(logits, vocab_size, key, wanted, BLOCK: tl.constexpr):
    """The id after the one with which ``wanted`` tokens have this key."""
    seen = tl.zeros([], dtype=tl.int64)
    end = tl.zeros([], dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids, inside, values = load_tile(logits, start, vocab_size, BLOCK)
        ties = (inside & (key_of(values) == key)).to(tl.int32)
        count = tl.sum(ties, 0)
        if (seen < wanted) & (count > 0):
            is_wanted = (ties > 0) & (seen + tl.cumsum(ties, 0) <= wanted)
            end = tl.max(tl.where(is_wanted, ids + 1, 0), 0)
        seen += count
    return end


@triton.jit
def pick(
    logits,
    vocab_size,
    target,
    last,
    end,
    floor,
    best_value,
    divisor,
    BLOCK: tl.constexpr,
):
    """The first token at which the running sum of the kept tokens' weights exceeds ``target``."""
    before = tl.zeros([], dtype=tl.int64)
    token = tl.zeros([], dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids, inside, values = load_tile(logits, start, vocab_size, BLOCK)
        keys = key_of(values)
        kept = inside & ((keys > last) | ((keys == last) & (ids < end)))
        kept &= values.to(tl.float64) >= floor
        weights = tl.where(kept, weights_of(values, best_value, divisor), 0)
        after = before + tl.sum(weights, 0)
        if (before <= target) & (target < after):
            exceeds = before + tl.cumsum(weights, 0) > target
            token = tl.min(tl.where(exceeds, ids, vocab_size), 0)
        before = after
    return token
