"""Triton sampling: from logits to tokens on the device, without a sort and without a copy to the
host.

If there are few rows, several programs share a row, each with a range of ids. Top-k, min-p and
top-p each keep the best tokens of a row in the order (logit, then lowest id). So the kept tokens
are a prefix of that order: all above a least logit, and the first ones with exactly that logit. The
least logit is found four bits at a time over the logits' bit patterns: a pass sums what is above
each of 16 thresholds, and the programs of a row exchange their sums.

Sums are of integer weights, so that neither the order of summation nor the number of programs can
change a draw; the random number is a hash of (seed, position). A row's token depends on its logits
and parameters only.

Traffic: a greedy row is read once, one without limits three times, and a limit reads it at most
nine times more, from the level-2 cache where the logits of all rows fit it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import SAMPLE_BLOCK, SAMPLE_OPTIONS, SAMPLE_PARTS
from quire.kernels.triton.sample_tile import (
    best_of,
    key_of,
    load_tile,
    random_uniform,
    sums_from,
    value_of,
    weights_of,
)

# S rows that sample   V vocabulary

LN_2 = tl.constexpr(math.log(2))
MOST = tl.constexpr(torch.finfo(torch.float32).max)
PARTS = tl.constexpr(SAMPLE_PARTS)
SLOTS = tl.constexpr(16)
"""Numbers that a program sends to the others of its row at once: one sum per threshold."""


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
    """`reference_sampling.sample`, for logits of any float type. Parameters and the int64 result
    are on the device of the logits."""
    num_rows, vocab_size = logits_SV.shape
    device = logits_SV.device
    token_ids_S = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids_S
    num_parts = parts_of_a_row(num_rows, vocab_size, device=device)
    # The double-buffered messages between programs of a row, and how often each has sent one.
    told = torch.empty(
        (num_rows, 2, SAMPLE_PARTS, SLOTS.value) if num_parts > 1 else 1,
        dtype=torch.int64,
        device=device,
    )
    meetings_S = torch.zeros(num_rows, dtype=torch.int32, device=device)
    sample_kernel[(num_rows * num_parts,)](
        logits_SV,
        temperature_S,
        top_k_S,
        top_p_S,
        temperature_S.double() * min_p_S.double().log(),
        seed_S,
        position_S,
        token_ids_S,
        told,
        meetings_S,
        vocab_size,
        logits_SV.stride(0),
        num_parts,
        BLOCK=SAMPLE_BLOCK,
        **SAMPLE_OPTIONS,
    )
    return token_ids_S


def parts_of_a_row(num_rows: int, vocab_size: int, *, device: torch.device) -> int:
    """The number of programs that share a row. Programs of a row wait for each other, so all must
    run at the same time: at most as many as multiprocessors. In Triton's interpreter, one."""
    if device.type != "cuda":
        return 1
    num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    num_tiles = -(-vocab_size // SAMPLE_BLOCK)
    return max(1, min(SAMPLE_PARTS, num_processors // num_rows, num_tiles))


@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "drop_ptr", "seed_ptr", "position_ptr",
        "token_ids_ptr", "told_ptr", "meetings_ptr",
    ],
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
    told_ptr,
    meetings_ptr,
    vocab_size,
    logits_stride,
    num_parts,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // num_parts).to(tl.int64)
    part = tl.program_id(0) % num_parts
    logits = logits_ptr + row * logits_stride
    told = told_ptr + row * 2 * PARTS * SLOTS
    meetings = meetings_ptr + row
    # This part's ids, in whole tiles.
    size = tl.cdiv(tl.cdiv(vocab_size, BLOCK), num_parts) * BLOCK
    begin = part * size
    stop = tl.minimum(begin + size, vocab_size)
    meeting = tl.zeros([], dtype=tl.int32)

    # The upper half is a key; in the lower half a lower id has a greater number.
    slots = tl.arange(0, SLOTS)
    mine = tl.zeros([SLOTS], dtype=tl.int64) + best_of(logits, begin, stop, BLOCK)
    table, meeting = exchange(mine, -0x8000000000000000, told, meetings, meeting, part, num_parts)
    both = tl.max(tl.max(table, 1), 0)
    best = (both >> 32).to(tl.int32)
    token = (0x7FFFFFFF - (both & 0x7FFFFFFF)).to(tl.int32)
    temperature = tl.load(temperature_ptr + row)
    is_mine = part == 0
    if temperature > 0:
        best_value = value_of(best)
        factor = tl.minimum(tl.div_rn(1.0, temperature * LN_2), MOST)
        floor = best_value.to(tl.float64) + tl.load(drop_ptr + row)
        # Tokens are kept if their key is above `last`, or if it is `last` and their id is below
        # `end` of this part.
        last = tl.full([], -0x80000000, dtype=tl.int32)
        end = stop
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab_size):
            last, above, meeting = search(
                logits, begin, stop, top_k.to(tl.int64), last, end, floor, best_value, factor,
                told, meetings, meeting, part, num_parts, True, BLOCK,
            )  # fmt: skip
            end, meeting = end_of_ties(
                logits, begin, stop, last, top_k.to(tl.int64) - above,
                told, meetings, meeting, part, num_parts, BLOCK,
            )  # fmt: skip
        sums = sums_from(
            logits, begin, stop, key_thresholds(0, 32), last, end, floor, best_value, factor,
            False, BLOCK,
        )  # fmt: skip
        before, total, meeting = share_out(sums, told, meetings, meeting, part, num_parts)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        if top_p < 1:
            share = top_p * total.to(tl.float64)
            wanted = share.to(tl.int64)
            wanted += (wanted.to(tl.float64) < share).to(tl.int64)
            cut, above, meeting = search(
                logits, begin, stop, wanted, last, end, floor, best_value, factor,
                told, meetings, meeting, part, num_parts, False, BLOCK,
            )  # fmt: skip
            # At least 1 unless the logits are NaN.
            weight = tl.maximum(weights_of(value_of(cut), best_value, factor), 1)
            num_ties = (wanted - above + weight - 1) // weight
            end, meeting = end_of_ties(
                logits, begin, stop, cut, num_ties, told, meetings, meeting, part, num_parts, BLOCK
            )
            last = cut
            sums = sums_from(
                logits, begin, stop, key_thresholds(0, 32), last, end, floor, best_value, factor,
                False, BLOCK,
            )  # fmt: skip
            before, total, meeting = share_out(sums, told, meetings, meeting, part, num_parts)
        uniform = random_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        own = tl.sum(tl.where(slots == 0, sums, 0), 0)
        # If no token has a weight, as with NaN, the first part writes the row's result.
        is_mine = ((before <= target) & (target < before + own)) | ((part == 0) & (total <= 0))
        token = tl.minimum(token, vocab_size - 1)
        if is_mine & (total > 0):
            token = pick(
                logits, begin, stop, target - before, last, end, floor, best_value, factor, BLOCK
            )
    tl.store(token_ids_ptr + row, token.to(tl.int64), mask=is_mine)


@triton.jit
def exchange(mine, absent, told, meetings, meeting, part, num_parts):
    """Exchanges 16 numbers between all parts: ``[16, PARTS]``, with ``absent`` for missing parts.

    Messages alternate between two buffers, so a program has passed a barrier with all readers of a
    buffer before it writes to it again.
    """
    slots = tl.arange(0, SLOTS)
    parts = tl.arange(0, PARTS)
    if num_parts > 1:
        place = told + (meeting & 1) * PARTS * SLOTS
        tl.store(place + part * SLOTS + slots, mine)
        tl.debug_barrier()  # All threads' writes precede the signal of one thread.
        meeting += 1
        tl.atomic_add(meetings, 1, sem="release", scope="gpu")
        # Adding 0 is an acquire load.
        while tl.atomic_add(meetings, 0, sem="acquire", scope="gpu") < meeting * num_parts:
            pass
        tl.debug_barrier()
        inside = (parts < num_parts)[None, :] & (slots >= 0)[:, None]
        table = tl.load(place + parts[None, :] * SLOTS + slots[:, None], mask=inside, other=absent)
    else:
        table = tl.where((parts == 0)[None, :], mine[:, None], absent)
    return table, meeting


@triton.jit
def share_out(sums, told, meetings, meeting, part, num_parts):
    """The sum of the first slot over the parts before this one, and over all parts."""
    table, meeting = exchange(sums, 0, told, meetings, meeting, part, num_parts)
    first = tl.where((tl.arange(0, SLOTS) == 0)[:, None], table, 0)
    before = tl.sum(tl.sum(tl.where((tl.arange(0, PARTS) < part)[None, :], first, 0), 1), 0)
    return before, tl.sum(tl.sum(first, 1), 0), meeting


@triton.jit
def key_thresholds(prefix, shift):
    """The 16 keys, counted from 0, that continue ``prefix`` with each digit of four bits."""
    return prefix + (tl.arange(0, SLOTS).to(tl.int64) << shift)


@triton.jit
def search(
    logits,
    begin,
    stop,
    wanted,
    last,
    end,
    floor,
    best_value,
    factor,
    told,
    meetings,
    meeting,
    part,
    num_parts,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest key for which tokens from it up sum to ``wanted``, and the sum above it."""
    prefix = tl.zeros([], dtype=tl.int64)
    above = tl.zeros([], dtype=tl.int64)
    for step in tl.range(0, 8):
        shift = 28 - 4 * step
        thresholds = key_thresholds(prefix, shift)
        sums = sums_from(
            logits, begin, stop, thresholds, last, end, floor, best_value, factor, COUNTS, BLOCK
        )
        table, meeting = exchange(sums, 0, told, meetings, meeting, part, num_parts)
        totals = tl.sum(table, 1)
        # Sums fall as thresholds rise, and the first one has enough.
        digit = tl.maximum(tl.sum((totals >= wanted).to(tl.int32), 0) - 1, 0)
        missed = tl.where(tl.arange(0, SLOTS) > digit, totals, 0)
        above = tl.where(digit < SLOTS - 1, tl.max(missed, 0), above)
        prefix += digit.to(tl.int64) << shift
    return (prefix - 0x80000000).to(tl.int32), above, meeting


@triton.jit
def end_of_ties(
    logits, begin, stop, key, wanted, told, meetings, meeting, part, num_parts, BLOCK: tl.constexpr
):
    """The end of this part's ids whose tokens with this key are among the row's first ``wanted``
    ones."""
    count = tl.zeros([], dtype=tl.int64)
    for start in tl.range(begin, stop, BLOCK):
        ids, inside, values = load_tile(logits, start, stop, BLOCK)
        count += tl.sum((inside & (key_of(values) == key)).to(tl.int32), 0)
    mine = tl.zeros([SLOTS], dtype=tl.int64) + count
    seen, _, meeting = share_out(mine, told, meetings, meeting, part, num_parts)
    end = begin
    for start in tl.range(begin, stop, BLOCK):
        ids, inside, values = load_tile(logits, start, stop, BLOCK)
        ties = (inside & (key_of(values) == key)).to(tl.int32)
        here = tl.sum(ties, 0)
        if (seen < wanted) & (here > 0):
            is_wanted = (ties > 0) & (seen + tl.cumsum(ties, 0) <= wanted)
            end = tl.max(tl.where(is_wanted, ids + 1, begin), 0)
        seen += here
    return end, meeting


@triton.jit
def pick(
    logits,
    begin,
    stop,
    target,
    last,
    end,
    floor,
    best_value,
    factor,
    BLOCK: tl.constexpr,
):
    """The first token at which the running sum of this part's kept weights exceeds ``target``."""
    before = tl.zeros([], dtype=tl.int64)
    token = tl.zeros([], dtype=tl.int32)
    for start in tl.range(begin, stop, BLOCK):
        ids, inside, values = load_tile(logits, start, stop, BLOCK)
        keys = key_of(values)
        kept = inside & ((keys > last) | ((keys == last) & (ids < end)))
        kept &= values.to(tl.float64) >= floor
        weights = tl.where(kept, weights_of(values, best_value, factor), 0)
        after = before + tl.sum(weights, 0)
        if (before <= target) & (target < after):
            exceeds = before + tl.cumsum(weights, 0) > target
            token = tl.min(tl.where(exceeds, ids, stop), 0)
        before = after
    return token
