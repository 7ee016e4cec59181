"""Every kernel as it is launched for each supported GPU: what `compile_check` compiles.

`shipped_cases` are those whose registers, stack and memory are judged; `portable_cases` are of
GPUs for which the kernels must compile, and nothing was chosen yet.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from quire.kernels.launch import (
    ACTIVATION_BLOCK,
    ADJUST_BLOCK,
    ALL_REDUCE_BLOCK,
    ALL_REDUCE_OPTIONS,
    DTYPES,
    ELEMENTWISE_OPTIONS,
    HEAD_SIZES,
    MERGE_OPTIONS,
    SAMPLE_BLOCK,
    SAMPLE_OPTIONS,
    SPLIT_TOKENS,
    WRITE_OPTIONS,
    launch_config,
    norm_options,
    rotary_heads,
)
from quire.kernels.triton_all_reduce import MAX_BYTES, MAX_RANKS, all_reduce_kernel
from quire.kernels.triton_decode import decode_kernel, merge_kernel
from quire.kernels.triton_elementwise import rms_norm_kernel, silu_and_mul_kernel
from quire.kernels.triton_kv_write import write_kernel
from quire.kernels.triton_logits import adjust_kernel
from quire.kernels.triton_prefill import prefill_kernel
from quire.kernels.triton_rotary import rotary_kernel
from quire.kernels.triton_sample import sample_kernel
from quire.kernels.triton_shared import shared_kernel

CAPABILITIES = (80, 90)
"""A100 and H100/H200."""
PORTABLE_CAPABILITIES = (100, 120)
"""Blackwell: B200, and RTX 50."""
AMD_CAPABILITY = 94
"""MI300 (gfx942), as torch counts it."""
NORM_SIZES = (2048, 8192, 32768)
"""The longest row of each number of warps."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel as it is launched for one model shape."""

    name: str
    kernel: Any
    dtype: torch.dtype
    size: int
    """Of a head, or of the row that a program works on."""
    capability: int
    constants: dict[str, int]
    options: dict[str, int | bool]
    types: dict[str, str] = field(default_factory=dict)
    """Triton's types of arguments whose names do not say them."""


def shipped_cases(
    *,
    head_sizes: Sequence[int] = HEAD_SIZES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    capabilities: Sequence[int] = CAPABILITIES,
) -> Iterator[KernelCase]:
    """Every kernel as it is launched for these; see `LaunchConfig` for what varies."""
    for dtype, head_size, capability in itertools.product(dtypes, head_sizes, capabilities):
        yield from _head_cases(dtype, head_size, capability)
    for dtype, capability in itertools.product(dtypes, capabilities):
        yield from _row_cases(dtype, capability)
        yield from _all_reduce_cases(dtype, capability)
    for capability in capabilities:
        yield from _sample_cases(capability)


def portable_cases() -> Iterator[KernelCase]:
    """Every kernel in bfloat16 with heads of 128, for GPUs that were not at hand at all."""
    yield from shipped_cases(
        head_sizes=(128,),
        dtypes=(torch.bfloat16,),
        capabilities=(*PORTABLE_CAPABILITIES, AMD_CAPABILITY),
    )


def _head_cases(dtype: torch.dtype, head_size: int, capability: int) -> Iterator[KernelCase]:
    # 3 heads of a KV head with heads of 64, else 4: both kinds of division are compiled.
    sizes = {"HEAD_SIZE": head_size, "BLOCK_D": triton.next_power_of_2(head_size)}
    heads = {"GROUP": 3 if head_size == 64 else 4, **sizes}
    split = {"SPLIT": SPLIT_TOKENS, "WINDOWED": False}
    plain = {"WINDOWED": False, "CAPPED": False}
    full = {"WINDOWED": True, "CAPPED": True}
    apart, together = {"SHARED": False}, {"SHARED": True}
    fp8 = {"k_ptr": "*u8", "v_ptr": "*u8", "k_cache_ptr": "*u8", "v_cache_ptr": "*u8"}
    decode, prefill = (
        launch_config(kernel, head_size=head_size, dtype=dtype, capability=capability)
        for kernel in ("decode", "prefill")
    )
    written = 8 * head_size
    written_sizes = {"SIZE": written, "BLOCK": triton.next_power_of_2(written)}
    fused = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": head_size // 2, **sizes}
    fused["BLOCK_H"] = rotary_heads(head_size)
    decode_sizes = {**heads, **decode.tile(), **split}
    prefill_sizes = {**heads, **prefill.tile()}
    shared_sizes = {**heads, **decode.tile(), "SPLIT": SPLIT_TOKENS, "CAPPED": False}
    kernels: list[tuple[str, Any, dict[str, int], dict[str, int | bool]]] = [
        ("decode", decode_kernel, {**decode_sizes, **plain, **apart}, decode.options()),
        ("prefill", prefill_kernel, {**prefill_sizes, **plain}, prefill.options()),
        ("decode_full", decode_kernel, {**decode_sizes, **full, **apart}, decode.options()),
        ("decode_rest", decode_kernel, {**decode_sizes, **plain, **together}, decode.options()),
        ("shared", shared_kernel, shared_sizes, decode.shared_options(is_float8=False)),
        ("prefill_full", prefill_kernel, {**prefill_sizes, **full}, prefill.options()),
        ("merge", merge_kernel, {**sizes, **split}, MERGE_OPTIONS),
        ("write_kv", write_kernel, written_sizes, WRITE_OPTIONS),
        ("rotary", rotary_kernel, {**fused, "NUM_KV_HEADS": 0}, ELEMENTWISE_OPTIONS),
        ("rotary_kv", rotary_kernel, fused, ELEMENTWISE_OPTIONS),
        ("write_fp8", write_kernel, written_sizes, WRITE_OPTIONS),
        ("rotary_fp8", rotary_kernel, fused, ELEMENTWISE_OPTIONS),
    ]
    if dtype != torch.float32:
        decode_fp8 = launch_config(
            "decode",
            head_size=head_size,
            dtype=dtype,
            capability=capability,
            cache_dtype=torch.float8_e4m3fn,
        )
        sizes_fp8 = {**decode_sizes, **decode_fp8.tile(), **plain, **apart}
        shared_fp8 = {**shared_sizes, **decode_fp8.tile()}
        kernels += [
            ("decode_fp8", decode_kernel, sizes_fp8, decode_fp8.options()),
            ("shared_fp8", shared_kernel, shared_fp8, decode_fp8.shared_options(is_float8=True)),
            ("prefill_fp8", prefill_kernel, {**prefill_sizes, **plain}, prefill.options()),
        ]
    for name, kernel, constants, options in kernels:
        yield KernelCase(
            name=name,
            kernel=kernel,
            dtype=dtype,
            size=head_size,
            capability=capability,
            constants=constants,
            options=options,
            types=fp8 if name.endswith("_fp8") else {},
        )


def _row_cases(dtype: torch.dtype, capability: int) -> Iterator[KernelCase]:
    for size in NORM_SIZES:
        yield KernelCase(
            name="rms_norm",
            kernel=rms_norm_kernel,
            dtype=dtype,
            size=size,
            capability=capability,
            constants={"SIZE": size, "BLOCK": size, "HAS_RESIDUAL": True},
            options=norm_options(size),
            types={"eps": "fp32"},
        )
    yield KernelCase(
        name="silu_and_mul",
        kernel=silu_and_mul_kernel,
        dtype=dtype,
        size=14336,
        capability=capability,
        constants={"SIZE": 14336, "BLOCK": ACTIVATION_BLOCK},
        options=ELEMENTWISE_OPTIONS,
    )


def _all_reduce_cases(dtype: torch.dtype, capability: int) -> Iterator[KernelCase]:
    for num_ranks in (2, 4, MAX_RANKS):
        yield KernelCase(
            name="all_reduce",
            kernel=all_reduce_kernel,
            dtype=dtype,
            size=num_ranks,
            capability=capability,
            constants={
                "RANKS": num_ranks,
                "HALF": MAX_BYTES // dtype.itemsize,
                "BLOCK": ALL_REDUCE_BLOCK,
            },
            options=ALL_REDUCE_OPTIONS,
            types={
                "buffers_ptr": "*i64",
                "flags_ptr": "*i64",
                "epochs_ptr": "*i32",
            },
        )


def _sample_cases(capability: int) -> Iterator[KernelCase]:
    yield KernelCase(
        name="adjust",
        kernel=adjust_kernel,
        dtype=torch.float32,
        size=ADJUST_BLOCK,
        capability=capability,
        constants={"BLOCK": ADJUST_BLOCK},
        options=ELEMENTWISE_OPTIONS,
        types=dict.fromkeys(("rows_ptr", "token_ids_ptr", "counts_ptr"), "*i32"),
    )
    yield KernelCase(
        name="sample",
        kernel=sample_kernel,
        dtype=torch.float32,
        size=SAMPLE_BLOCK,
        capability=capability,
        constants={"BLOCK": SAMPLE_BLOCK},
        options=SAMPLE_OPTIONS,
        types={
            "top_k_ptr": "*i32",
            "drop_ptr": "*fp64",
            "seed_ptr": "*i64",
            "position_ptr": "*i64",
            "token_ids_ptr": "*i64",
        },
    )
