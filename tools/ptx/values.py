"""PTX types, and conversions between their bits and values in NumPy arrays.

Registers hold unsigned integers. `decode` gives the numbers they stand for: integers of their
own type, float32 for every float of 32 bits or fewer, float64. `encode` rounds to nearest even.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

UNSIGNED: dict[int, Any] = {
    1: np.bool_,
    8: np.uint8,
    16: np.uint16,
    32: np.uint32,
    64: np.uint64,
}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_SMALL_FLOATS = {"e4m3": (4, 3), "e5m2": (5, 2)}


@dataclass(frozen=True)
class Type:
    name: str
    """Type of one element: ``s32``, ``bf16``, ``e4m3``, ``pred``."""
    bits: int
    """Width of one element."""
    count: int = 1
    """2 where a register holds a pair, the first in its low half."""

    @property
    def is_float(self) -> bool:
        return self.name[0] == "f" or self.name in ("bf16", "tf32", *_SMALL_FLOATS)

    @property
    def is_signed(self) -> bool:
        return self.name[0] == "s"

    @property
    def dtype(self) -> Any:
        """What registers of it are kept as."""
        return UNSIGNED[self.bits * self.count]

    @property
    def element(self) -> "Type":
        return Type(self.name, self.bits)


@cache
def type_of(name: str) -> Type:
    """
    Raises:
        NotImplementedError: There is no such type, or none that is known here.
    """
    match = re.fullmatch(r"(pred|tf32|e4m3|e5m2|[subf](?:8|16|32|64)|bf16)(x2)?", name)
    if match is None:
        raise NotImplementedError(f"type .{name}")
    base, pair = match.groups()
    bits = 1 if base == "pred" else 8 if base in _SMALL_FLOATS else int(base.lstrip("subft"))
    return Type(base, bits, 2 if pair else 1)


def decode(bits: Array, kind: Type) -> Array:
    """The numbers of one element each; ``bits`` are unsigned and as wide as the type."""
    name = kind.name
    if name in ("f32", "tf32"):
        return bits.view(np.float32)
    if name == "f64":
        return bits.view(np.float64)
    if name == "f16":
        return bits.view(np.float16).astype(np.float32)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name in _SMALL_FLOATS:
        return small_float_values(name)[bits]
    return bits.view(SIGNED[kind.bits]) if kind.is_signed else bits


def encode(values: Array, kind: Type) -> Array:
    """The bits of numbers, in the type's own unsigned integers."""
    name = kind.name
    if name in ("f32", "tf32"):
        return values.astype(np.float32, copy=False).view(np.uint32)
    if name == "f64":
        return values.astype(np.float64, copy=False).view(np.uint64)
    if name == "f16":
        return values.astype(np.float16).view(np.uint16)
    if name == "bf16":
        return _bfloat16(values)
    if name in _SMALL_FLOATS:
        return _small_float(values, name)
    if name == "pred":
        return values.astype(np.bool_)
    if values.dtype.kind == "f":  # a sum of products of integers
        dtype = SIGNED[kind.bits] if kind.is_signed else UNSIGNED[kind.bits]
        limits = np.iinfo(dtype)
        return values.clip(limits.min, limits.max).astype(dtype).view(UNSIGNED[kind.bits])
    if values.dtype.itemsize * 8 == kind.bits:
        return values.view(UNSIGNED[kind.bits])
    return values.astype(UNSIGNED[kind.bits])


def _bfloat16(values: Array) -> Array:
    single = values.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint16(0x7FFF), rounded.astype(np.uint16))


@cache
def small_float_values(name: str) -> Array:
    """The value of each of the 256 bytes. e4m3 has no infinity and one NaN of either sign."""
    exponent_bits, fraction_bits = _SMALL_FLOATS[name]
    bias = (1 << (exponent_bits - 1)) - 1
    values = np.empty(256, np.float32)
    for byte in range(256):
        fraction = byte & ((1 << fraction_bits) - 1)
        exponent = (byte & 0x7F) >> fraction_bits
        if exponent:
            size = (1 + fraction / (1 << fraction_bits)) * 2.0 ** (exponent - bias)
        else:
            size = fraction / (1 << fraction_bits) * 2.0 ** (1 - bias)
        if name == "e4m3" and byte & 0x7F == 0x7F:
            size = float("nan")
        elif name == "e5m2" and exponent == 31:
            size = float("nan") if fraction else float("inf")
        values[byte] = -size if byte & 0x80 else size
    return values


def _small_float(values: Array, name: str) -> Array:
    """Nearest, ties to even, past the largest number to it, as ``.satfinite`` does."""
    sizes = small_float_values(name)[:0x80]
    finite = sizes[np.isfinite(sizes)].astype(np.float64)
    size = np.minimum(np.abs(values.astype(np.float64)), finite[-1])
    below = np.clip(np.searchsorted(finite, size, side="right") - 1, 0, len(finite) - 2)
    middle = (finite[below] + finite[below + 1]) / 2
    is_up = (size > middle) | ((size == middle) & (below % 2 == 1))
    byte = (below + is_up).astype(np.uint8)
    byte = np.where(np.isnan(values), np.uint8(0x7F), byte)
    return np.where(np.signbit(values), byte | np.uint8(0x80), byte)


def split(bits: Array, kind: Type) -> list[Array]:
    """The elements of a pair, the low one first; of one element itself."""
    if kind.count == 1:
        return [bits]
    part = UNSIGNED[kind.bits]
    wide = bits.dtype.type
    return [bits.astype(part), (bits >> wide(kind.bits)).astype(part)]


def join(elements: list[Array], kind: Type) -> Array:
    """Undoes `split`."""
    if kind.count == 1:
        return elements[0]
    low, high = (element.astype(kind.dtype) for element in elements)
    return np.asarray(low | (high << kind.dtype(kind.bits)))


def on_elements(function: Callable[..., Array], kind: Type) -> Callable[..., Array]:
    """A function of numbers as one of registers, element by element."""

    def of_registers(*registers: Array) -> Array:
        parts = zip(*(split(bits, kind) for bits in registers), strict=True)
        element = kind.element
        results = [
            encode(np.asarray(function(*(decode(bits, element) for bits in part))), element)
            for part in parts
        ]
        return join(results, kind)

    return of_registers
