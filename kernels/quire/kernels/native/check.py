"""Checks tensors before the native library gets their pointers: with a wrong shape or type it would
access arbitrary memory. The library itself checks indices, once per step."""

import torch
from torch import Tensor

from quire.kernels.ops import NormKind
from quire.kernels.quantization import SCALE_BYTES

# N blocks   L tokens of a block   K KV heads   D head size

_BLOCK_SIZES = "4, 8 or a multiple of 16"


class NotNative(Exception):
    """The library does not support a program; the message says which part."""


def pointer(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of the values of ``x``.

    Raises:
        ValueError: ``x`` is not contiguous, of this type and shape, in the CPU's memory.
    """
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{name}: {_is(x)}; must be contiguous {dtype} {shape} on the CPU")
    return x.data_ptr()


def rows_pointer(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of the values of ``x``, in which only each row must be contiguous."""
    if x.dtype != dtype or x.shape != shape or not x.is_cpu:
        raise ValueError(f"{name}: {_is(x)}; must be {dtype} {shape} on the CPU")
    if x.numel():
        pointer(f"a row of {name}", x[0], dtype, *shape[1:])
    return x.data_ptr()


def norm_pointer(
    name: str, x_C: Tensor, kind: NormKind, dtype: torch.dtype, num_channels: int
) -> int:
    """The address of a norm's weights or biases, for a model of ``dtype``. Raises as `pointer`."""
    return pointer(name, x_C, dtype if kind == "rms" else torch.float32, num_channels)


def check_caches(
    k_cache: Tensor, v_cache: Tensor, *, dtype: torch.dtype, num_kv_heads: int, head_size: int
) -> tuple[int, int]:
    """The number of blocks of two caches ``[N, L, K, D]``, and of tokens per block.

    Raises:
        ValueError: The library does not support caches of this type or layout.
    """
    if k_cache.dim() != 4:
        raise ValueError(f"K cache: {_is(k_cache)}; must be blocks, tokens, KV heads, channels")
    num_blocks, block_size = k_cache.shape[:2]
    if block_size not in (4, 8) and (block_size % 16 or not block_size):
        raise ValueError(f"KV cache: blocks of {block_size} tokens; must be {_BLOCK_SIZES}")
    is_int8 = k_cache.dtype == torch.int8
    shape = (num_blocks, block_size, num_kv_heads, head_size + SCALE_BYTES * is_int8)
    for name, cache in (("K cache", k_cache), ("V cache", v_cache)):
        pointer(name, cache, torch.int8 if is_int8 else dtype, *shape)
    return num_blocks, block_size


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError if the query heads are not a multiple of the KV heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads: must be a multiple of {num_kv_heads} KV heads")


def _is(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}"
