"""What the sampling kernel does with one tile of a row's logits: keys, weights and the hash.

A key is a logit's bit pattern, made an int32 of the same order; the two zeros share one. A weight
is ``floor(2**32 * 2**x)`` by arithmetic that every device rounds alike, so that weights are the
same integers everywhere: an own polynomial, as devices differ in the last bits of theirs.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(logits, start, vocab_size, BLOCK: tl.constexpr):
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    return ids, inside, tl.load(logits + ids, mask=inside, other=float("-inf"))


@triton.jit
def first_best(logits, vocab_size, BLOCK: tl.constexpr):
    """The least and the greatest key of a row, and the first token of the greatest."""
    least = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    best = tl.full([], -0x80000000, dtype=tl.int32)
    token = tl.zeros([], dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids, inside, values = load_tile(logits, start, vocab_size, BLOCK)
        keys = key_of(values)
        least = tl.minimum(least, tl.min(tl.where(inside, keys, 0x7FFFFFFF), 0))
        here = tl.max(tl.where(inside, keys, -0x80000000), 0)
        first = tl.min(tl.where(inside & (keys == here), ids, vocab_size), 0)
        token = tl.where(here > best, first, token)
        best = tl.maximum(best, here)
    return least, best, token


@triton.jit
def key_of(values):
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(values, best_value, divisor):
    """``reference_sampling.sampling_weights``, operation for operation."""
    exponents = tl.maximum(tl.div_rn(values - best_value, divisor), -40.0)
    whole = tl.floor(exponents + 0.5)
    x = exponents - whole
    power = x * 1.5252734e-05 + 1.5403530e-04
    power = power * x + 1.3333558e-03
    power = power * x + 9.6181291e-03
    power = power * x + 5.5504109e-02
    power = power * x + 2.4022651e-01
    power = power * x + 6.9314718e-01
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
