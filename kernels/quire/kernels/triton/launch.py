"""Launch configurations of the Triton kernels: every tile size, with no autotuning at run time.

A tile size determines the order of summation, so choosing one by timing would make results differ
between runs. The values here depend on head size, dtype and kind of GPU, never on the batch.
`tools.kernels.compile_check` compiles every entry for each supported GPU and refuses one that
spills registers.
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = 1.4426950408889634
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
MAX_CHANNELS = 32768
"""The longest row of a norm: a program holds a whole row in registers."""

AMD_CAPABILITY = 94
"""MI300 (gfx942), as torch numbers it."""
capability_without_gpu = ContextVar("capability_without_gpu", default=80)
"""The GPU whose tile sizes are used without a GPU: in Triton's interpreter, or when
`tools.kernels.captured` compiles for the GPU that it sets here."""

SPLIT_TOKENS = 256
"""Tokens of context in one program of the decode kernel, counted from token 0. Short enough that
one long sequence fills a GPU, long enough that its partial result (G * D float32) is a hundredth
of the KV it read."""


PREFILL_SPLIT_TOKENS = 2048
"""Tokens of context that the prefill kernel reduces from an empty state, counted from token 0: a
multiple of every prefill's `block_n`. Short enough that a few tokens after 8k of context get four
times the programs, long enough that a program which merges splits loses a few percent of its time
to it [estimated]."""

SHARED_PAIRS = 16
"""(row, query head) pairs of a decode program: `block_m` of every decode entry below, so that rows
that share a program have the same bits as alone."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The shape of one program."""

    block_m: int
    """Rows of the score matrix: (query, head of the group) pairs. At least 16, for `tl.dot`; a
    multiple of 64 where wgmma is wanted."""
    block_n: int
    """Tokens of KV in one step of the loop; divides `SPLIT_TOKENS`."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """The most registers per thread that NVIDIA's assembler may use; ``None``: its choice."""

    def tile(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}

    def options(self) -> dict[str, int | bool]:
        options = compiler_options(num_warps=self.num_warps, num_stages=self.num_stages)
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}

    def kept_options(self) -> dict[str, int | bool]:
        """Launch options of a prefill whose context has several splits."""
        options = self.options()
        if not _is_amd():
            # Without a limit, NVIDIA's assembler aims at 128 for small heads and spills.
            options["maxnreg"] = 255
        return options

    def shared_options(self, *, is_float8: bool) -> dict[str, int | bool]:
        """Launch options of a decode whose rows share KV: the same program, so the same bits."""
        options = self.options()
        if is_float8 and self.block_n == _FLOAT8_BLOCK_N and not _is_amd():
            # Without a limit, NVIDIA's assembler aims at 128 and spills on sm_90.
            options["maxnreg"] = 192
        return options


def _is_amd() -> bool:
    """Whether the compiler is AMD's, which does not support ``maxnreg``."""
    return torch.version.hip is not None or capability_without_gpu.get() == AMD_CAPABILITY


def launch_config(
    kernel: Literal["decode", "prefill"],
    *,
    head_size: int,
    dtype: torch.dtype,
    capability: int,
    cache_dtype: torch.dtype | None = None,
) -> LaunchConfig:
    """The configuration of a kernel; ``capability`` is 80 for an A100, 90 for an H100.

    ``dtype`` is the type of the queries, and of the cache unless ``cache_dtype`` is given.

    Raises:
        ValueError: No kernel is shipped for the head size, the dtype, or the two dtypes together.
    """
    if head_size not in HEAD_SIZES:
        raise ValueError(f"head_size={head_size}: the Triton kernels support {HEAD_SIZES}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: the Triton kernels support {DTYPES}")
    width = "narrow" if head_size <= 64 else "middle" if head_size <= 128 else "wide"
    is_float8 = cache_dtype == torch.float8_e4m3fn
    if is_float8 and dtype == torch.float32:
        raise ValueError(
            "a float8_e4m3fn KV cache with float32 queries: the Triton kernels read such a cache "
            "with bfloat16 and float16 ones"
        )
    if dtype == torch.float32:
        return _FLOAT[kernel, width]
    if kernel == "decode" and capability == AMD_CAPABILITY:
        return _AMD_DECODE[width]
    # Consumer Blackwell (120) has neither wgmma nor the shared memory of data centre GPUs.
    config = (_HALF_SM90 if 90 <= capability < 120 else _HALF_SM80)[kernel, width]
    if kernel == "decode" and head_size == 16 and capability == 80:
        # Without a limit, the assembler aims at 96 registers and spills; with this it uses 94.
        return replace(config, max_registers=112)
    return config


def prefill_split(
    *, head_size: int, capability: int, cache_dtype: torch.dtype | None = None
) -> int:
    """Tokens of context per split of the prefill kernel; independent of the batch."""
    is_wide_float8 = head_size > 128 and cache_dtype == torch.float8_e4m3fn
    # It would spill 56 bytes; other tiles would not spill less.
    return _NO_SPLIT if is_wide_float8 and 90 <= capability < 120 else PREFILL_SPLIT_TOKENS


def prefill_parts(num_programs: int, *, num_splits: int) -> int:
    """Programs of the prefill kernel per tile of queries: one for all splits, or one per split.
    The bits of the result are the same."""
    fills_gpu = num_programs >= _PREFILL_PROGRAMS
    return 1 if fills_gpu or num_programs * num_splits > _MAX_PREFILL_PARTS else num_splits


def compiler_options(*, num_warps: int, num_stages: int = 1) -> dict[str, int | bool]:
    """Options of Triton's compiler.

    It may not fuse multiplications and additions on its own: it could do so in one loop of a kernel
    and not in another, and the default differs between versions.
    """
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def experts_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """Launch options of the experts' products, except a tile's rows and outputs."""
    num_warps, block_k, num_stages = (4, 32, 3) if dtype == torch.float32 else (4, 64, 4)
    return {"BLOCK_K": block_k, **compiler_options(num_warps=num_warps, num_stages=num_stages)}


def low_rank_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """Launch options of adapters' products with inputs of ``dtype``."""
    return compiler_options(num_warps=4, num_stages=1 if dtype == torch.float32 else 3)


def grouped_options(dtype: torch.dtype) -> dict[str, int | bool]:
    """Launch options of products with 4-bit weights."""
    return compiler_options(num_warps=4, num_stages=1 if dtype == torch.float32 else 3)


def capped_scales(scale: float, *, soft_cap: float | None) -> tuple[float, float]:
    """``scale_log2`` and ``cap_scale`` of `triton_tile.attend_tile`."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return soft_cap * LOG2_E, 2 * LOG2_E * scale / soft_cap


def norm_options(num_channels: int) -> dict[str, int | bool]:
    """Launch options of norms: more warps for longer rows.

    Raises:
        ValueError: A row does not fit the registers.
    """
    for limit, num_warps in _NORM_WARPS:
        if num_channels <= limit:
            return compiler_options(num_warps=num_warps)
    raise ValueError(
        f"num_channels={num_channels}: the Triton norm supports at most {MAX_CHANNELS}"
    )


def rotary_heads(head_size: int) -> int:
    """Heads in one program of the rotary kernel."""
    return max(1, _ROTARY_BLOCK >> (head_size - 1).bit_length())


def block_shift(cache: Tensor) -> int:
    """log2 of the cache's block size: kernels find a token's block with a shift."""
    block_size = cache.shape[1]
    assert block_size in BLOCK_SIZES, f"block_size={block_size}: must be one of {BLOCK_SIZES}"
    return block_size.bit_length() - 1


def device_capability(device: torch.device) -> int:
    """The GPU's compute capability as 80, 90 and so on; without one `capability_without_gpu`."""
    if device.type != "cuda":
        return capability_without_gpu.get()
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _config(block_m: int, block_n: int, num_warps: int, num_stages: int) -> LaunchConfig:
    return LaunchConfig(
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
    )


# Registers, stack, shared memory and tensor-core instructions of each:
# `python -m tools.kernels.compile_check`. Without a GPU at hand these were chosen as the largest
# tiles that spill nothing; what a benchmark on one shows to be better replaces them.
# Decodes get two buffers for K and V: Triton shares the stages between the loads of a block table
# and of the KV that it points to, so that 3 and 4 leave one buffer and wait for every load.
_DECODE_STAGES = 5
# MI300 has 64 KiB of shared memory, and two buffers take 96.
_AMD_DECODE = {
    "narrow": _config(16, 64, 4, 3),
    "middle": _config(16, 64, 4, 3),
    "wide": _config(16, 32, 4, 3),
}
_HALF_SM90 = {
    ("decode", "narrow"): _config(16, 64, 4, _DECODE_STAGES),
    ("decode", "middle"): _config(16, 64, 4, _DECODE_STAGES),
    ("decode", "wide"): _config(16, 32, 4, _DECODE_STAGES),
    ("prefill", "narrow"): _config(128, 64, 8, 3),
    ("prefill", "middle"): _config(128, 64, 8, 2),
    ("prefill", "wide"): _config(128, 32, 8, 2),
}
_HALF_SM80 = {
    ("decode", "narrow"): _config(16, 64, 4, _DECODE_STAGES),
    ("decode", "middle"): _config(16, 64, 4, _DECODE_STAGES),
    ("decode", "wide"): _config(16, 32, 4, _DECODE_STAGES),
    ("prefill", "narrow"): _config(128, 64, 8, 3),
    ("prefill", "middle"): _config(128, 32, 8, 3),
    ("prefill", "wide"): _config(64, 32, 8, 2),
}
_FLOAT8_BLOCK_N = 64
# The FMA units, not the tensor cores, whose float32 has 10 bits of mantissa.
_FLOAT = {
    ("decode", "narrow"): _config(16, 32, 4, 2),
    ("decode", "middle"): _config(16, 16, 4, 2),
    ("decode", "wide"): _config(16, 16, 4, 2),
    ("prefill", "narrow"): _config(32, 16, 4, 2),
    ("prefill", "middle"): _config(32, 16, 8, 1),  # a second stage spills with a window on sm_80
    ("prefill", "wide"): _config(16, 32, 8, 1),  # a second stage spills
}

_NO_SPLIT = 1 << 30
_PREFILL_PROGRAMS = 96
"""Programs from which a GPU counts as full: an A100 has 108 multiprocessors, an H100 132, and with
most tiles each runs one program at a time."""
_MAX_PREFILL_PARTS = 2048
"""The most partial results, one per split and tile: 136 MB with heads of 128."""

PREFILL_MERGE_BLOCK = 8
PREFILL_MERGE_OPTIONS = compiler_options(num_warps=4)
# One warp, so that one thread sums a channel over the splits and short rows cost little. Its
# registers can load 16 splits at a time.
MERGE_OPTIONS = compiler_options(num_warps=1)
MERGE_BLOCK = 16
WRITE_OPTIONS = compiler_options(num_warps=4)
ELEMENTWISE_OPTIONS = compiler_options(num_warps=4)
SAMPLE_OPTIONS = compiler_options(num_warps=16)
GROUPED_TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64}
"""The tile of products with 4-bit weights."""
LOW_RANK_STEP = 16
"""Ranks of an adapter per step: the least that `tl.dot` supports."""
LOW_RANK_TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}
"""Tokens, outputs and inputs per step of adapters' products: few tokens, as most are decodes."""
EXPERTS_BLOCK = 64
"""Rows and outputs per tile of experts' products: one shape for any number of rows, because another
shape may sum in another order."""
ACTIVATION_BLOCK = 1024
SAMPLE_BLOCK = 2048
SAMPLE_PARTS = 32
"""The most programs that share a row of logits: a power of two."""
ADJUST_BLOCK = 1024
MASK_BLOCK = 1024
ALL_REDUCE_BLOCK = 2048
ALL_REDUCE_OPTIONS = compiler_options(num_warps=8)
_ROTARY_BLOCK = 1024
_NORM_WARPS = ((2048, 4), (8192, 8), (MAX_CHANNELS, 16))
