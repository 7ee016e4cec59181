"""The sampling kernel's functions for one tile of a row's logits: keys, weights and the hash.

A key is a logit's bit pattern as an int32 of the same order; both zeros have the same key. A weight
is ``floor(2**32 * 2**x)``. It is computed by a fixed polynomial, each operation of which every
device rounds alike, because the built-in exponentials of devices differ in their last bits.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(logits, start, stop, BLOCK: tl.constexpr):
    ids = start + tl.arange(0, BLOCK)
    inside = ids < stop
    return ids, inside, tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def best_of(logits, begin, stop, BLOCK: tl.constexpr):
    """The greatest key of the ids ``begin`` to ``stop`` and, in the lower half, the first id with
    that key, encoded so that a lower id has a greater number."""
    best = tl.full([], -0x8000000000000000, dtype=tl.int64)
    for start in tl.range(begin, stop, BLOCK):
        ids, inside, values = load_tile(logits, start, stop, BLOCK)
        both = (key_of(values).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(inside, both, -0x8000000000000000), 0))
    return best


@triton.jit
def sums_from(
    logits,
    begin,
    stop,
    thresholds,
    last,
    end,
    floor,
    best_value,
    factor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each threshold, the number of ids with a key from it up (``COUNTS``), or the weight of
    the kept ones among them. Thresholds are keys counted from 0."""
    sums = tl.zeros([thresholds.shape[0]], dtype=tl.int64)
    for start in tl.range(begin, stop, BLOCK):
        ids, inside, values = load_tile(logits, start, stop, BLOCK)
        keys = key_of(values)
        if COUNTS:
            weights = inside.to(tl.int64)
        else:
            kept = inside & ((keys > last) | ((keys == last) & (ids < end)))
            kept &= values.to(tl.float64) >= floor
            weights = tl.where(kept, weights_of(values, best_value, factor), 0)
        reached = (keys.to(tl.int64) + 0x80000000)[None, :] >= thresholds[:, None]
        sums += tl.sum(tl.where(reached, weights[None, :], 0), 1)
    return sums


@triton.jit
def key_of(values):
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(values, best_value, factor):
    """``reference_sampling.sampling_weights``, operation for operation."""
    exponents = tl.maximum((values - best_value) * factor, -40.0)
    whole = tl.floor(exponents + 0.5)
    x = exponents - whole
    power = x * 1.32647261e-03 + 9.67151299e-03
    power = power * x + 5.55073358e-02
    power = power * x + 2.40222424e-01
    power = power * x + 6.93147004e-01
    power = power * x + 1.0
    scale = ((whole.to(tl.int32) + 159) << 23).to(tl.float32, bitcast=True)
    return (power * scale).to(tl.int64)


@triton.jit
def random_uniform(seed, position):
    """``reference_sampling.random_uniform``."""
    state = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    state += (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
