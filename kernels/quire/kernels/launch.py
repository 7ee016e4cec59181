"""How the Triton kernels are launched: every tile size, in one place, with no tuning at run time.

A tile size decides the order of summation, so one that was chosen by timing would make results
depend on the day. What is here depends on head size and dtype alone, never on the batch.
`quire.kernels.compile_check` compiles every entry for each supported GPU and refuses one that
spills registers.
"""

from dataclasses import dataclass
from typing import Literal

import torch

HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)

SPLIT_TOKENS = 256
"""Tokens of context in one program of the decode kernel, counted from token 0. Short enough that
one long sequence fills a GPU, long enough that its partial result (G * D float32) is a hundredth
of the KV it read."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The shape of one program."""

    block_m: int
    """Rows of the score matrix: (query, head of the group) pairs. At least 16, for `tl.dot`."""
    block_n: int
    """Tokens of KV in one step of the loop; divides `SPLIT_TOKENS`."""
    num_warps: int
    num_stages: int


def launch_config(
    kernel: Literal["decode", "prefill"], *, head_size: int, dtype: torch.dtype
) -> LaunchConfig:
    """The one configuration of a kernel for a head size and a dtype.

    Raises:
        ValueError: No kernel is shipped for the head size or the dtype.
    """
    if head_size not in HEAD_SIZES:
        raise ValueError(f"head_size={head_size}: the Triton kernels support {HEAD_SIZES}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: the Triton kernels support {DTYPES}")
    width = "narrow" if head_size <= 64 else "middle" if head_size <= 128 else "wide"
    return _CONFIGS[kernel, "float" if dtype == torch.float32 else "half", width]


# Registers, shared memory and wgmma counts of each: `python -m quire.kernels.compile_check`.
# float32 uses the FMA units (`input_precision="ieee"`), so its tiles are small.
_CONFIGS = {
    ("decode", "half", "narrow"): LaunchConfig(block_m=16, block_n=64, num_warps=4, num_stages=3),
    ("decode", "half", "middle"): LaunchConfig(block_m=16, block_n=64, num_warps=4, num_stages=3),
    ("decode", "half", "wide"): LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=3),
    ("decode", "float", "narrow"): LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=2),
    ("decode", "float", "middle"): LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=2),
    ("decode", "float", "wide"): LaunchConfig(block_m=16, block_n=16, num_warps=4, num_stages=2),
    ("prefill", "half", "narrow"): LaunchConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    ("prefill", "half", "middle"): LaunchConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
    ("prefill", "half", "wide"): LaunchConfig(block_m=64, block_n=32, num_warps=4, num_stages=2),
    ("prefill", "float", "narrow"): LaunchConfig(block_m=64, block_n=32, num_warps=8, num_stages=2),
    ("prefill", "float", "middle"): LaunchConfig(block_m=32, block_n=32, num_warps=8, num_stages=2),
    ("prefill", "float", "wide"): LaunchConfig(block_m=32, block_n=16, num_warps=8, num_stages=2),
}
