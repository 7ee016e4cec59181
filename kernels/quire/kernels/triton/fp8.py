"""float8_e4m3fn in Triton, for GPUs with and without such a type.

NVIDIA GPUs from Ada Lovelace (89) on have an instruction to convert it, so kernels load its values
directly. For other GPUs caches are passed as bytes, and `from_e4m3` shifts their bits to float16
values that are 256 times too small, which costs almost nothing. Launchers put the factor into the
scales of K and V. Powers of 2 do not round, so both ways have the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import AMD_CAPABILITY, device_capability

LOADED_SCALE = 256.0
"""The factor from a value of `from_e4m3` to the one that was stored."""


def cache_view(cache: Tensor) -> Tensor:
    """The cache as kernels write it: bytes if it is float8_e4m3fn, else unchanged.

    Raises:
        ValueError: The cache is of another 8-bit type.
    """
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)
    if cache.dtype.itemsize == 1:
        raise ValueError(f"KV cache of {cache.dtype}: the Triton kernels read float8_e4m3fn")
    return cache


def loaded_view(cache: Tensor) -> Tensor:
    """The cache as kernels read it: unchanged if the GPU converts float8, else as `cache_view`.

    Raises:
        ValueError: The cache is of another 8-bit type.
    """
    return cache if _is_converted(cache) else cache_view(cache)


def loaded_scale(cache: Tensor, scale: float) -> float:
    """The factor from values that a kernel loads from `loaded_view` to those that were stored."""
    if cache.dtype != torch.float8_e4m3fn:
        return 1.0
    return scale if _is_converted(cache) else scale * LOADED_SCALE


def converts_float8(capability: int) -> bool:
    """Whether a GPU can convert float8_e4m3fn; MI300's float8 has another exponent bias."""
    return capability >= 89 and capability != AMD_CAPABILITY


def _is_converted(cache: Tensor) -> bool:
    return cache.dtype == torch.float8_e4m3fn and converts_float8(device_capability(cache.device))


@triton.jit
def from_e4m3(bits):
    """A 256th of each value as float16, exact but for NaN, which no kernel writes and which reads
    as 480. The exponent's bias is 7 here and 15 there."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(values):
    """float32 values as float8 bytes, rounded to nearest even; values beyond 448 become 448."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Round 23 bits of fraction to 3, a carry goes to the exponent, and move its bias.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: adding 2^14 leaves float32 just that.
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return (sign | tl.where(size < 0.015625, tiny, normal)).to(tl.uint8)
