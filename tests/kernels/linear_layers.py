"""Helpers for tests of packed linear layers, for every type of weights."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.grouped import GroupedWeight
from quire.kernels.native import abi as native_abi
from quire.kernels.native.int8 import Int8Linear
from quire.kernels.native.linear import Arena, PackedLinear

SENTINEL = 7.0

Kind = Callable[..., PackedLinear | Int8Linear]


def run_into(
    kind: Kind,
    library: ctypes.CDLL,
    x: Tensor,
    weight: Tensor | GroupedWeight,
    *,
    mode: int,
    num_parts: int = 1,
    margin: int = 0,
) -> Tensor:
    """Runs the layer into sentinels with ``margin`` more rows and columns; returns all of them."""
    gated = mode == native_abi.GATED
    linear = kind(library, Arena(library), weight, None, num_parts=num_parts, gated=gated)
    dtype = torch.float32 if mode == native_abi.STORE_F32 else x.dtype
    out = torch.full((len(x) + margin, linear.num_out + margin), SENTINEL, dtype=dtype)
    linear.run(x, out, mode)
    return out


def assert_ranks_add_up(
    kind: Kind,
    library: ctypes.CDLL,
    shares: Sequence[tuple[Tensor, Tensor | GroupedWeight]],
    whole: Tensor,
    *,
    num_parts: int,
) -> None:
    """Asserts that the ranks' products, of each share's input and weight, sum to ``whole``."""
    parts = [
        run_into(
            kind,
            library,
            x,
            weight,
            num_parts=num_parts // len(shares),
            mode=native_abi.STORE_F32,
        )
        for x, weight in shares
    ]
    while len(parts) > 1:  # the upper levels of the tree sum
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    assert torch.equal(parts[0], whole)
