"""float8_e4m3fn in Triton by integer arithmetic, for GPUs with and without such a type.

Caches of it are passed to kernels as bytes. Their values come out of `from_e4m3` as float16 and
256 times too small, which moving bits to their place costs nothing to give; launchers put the
factor into the scales of K and V.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOADED_SCALE = 256.0
"""What a value of `from_e4m3` is multiplied with to be the one that was stored."""


def cache_view(cache: Tensor) -> Tensor:
    """The cache as kernels take it: bytes where it is float8_e4m3fn, else itself.

    Raises:
        ValueError: The cache is of another 8-bit type.
    """
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)
    if cache.dtype.itemsize == 1:
        raise ValueError(f"KV cache of {cache.dtype}: the Triton kernels read float8_e4m3fn")
    return cache


def loaded_scale(cache: Tensor, scale: float) -> float:
    """The factor from what a kernel loads from a cache to what was written to it."""
    return scale * LOADED_SCALE if cache.dtype == torch.float8_e4m3fn else 1.0


@triton.jit
def from_e4m3(bits):
    """A 256th of each value as float16, exact. The exponent's bias is 7 here and 15 there."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(values):
    """Bytes of float32 values, rounded to nearest even, past 448 to 448."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Round 23 bits of fraction to 3, a carry goes to the exponent, and move its bias.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: adding 2^14 leaves float32 just that.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return (sign | tl.where(size < 0.015625, tiny, normal)).to(tl.uint8)
