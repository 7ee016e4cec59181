"""What the compiler makes of the shipped kernels for an A100 and an H100, without either."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton to be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "TRITON_INTERPRET=1 turns the compiler off: run this file in a process without it",
        allow_module_level=True,
    )

from quire.kernels.compile_cases import KernelCase, shipped_cases
from quire.kernels.compile_check import compile_case
from quire.kernels.launch import SPLIT_TOKENS, launch_config
from quire.kernels.triton_decode import decode_kernel
from quire.kernels.triton_prefill import prefill_kernel

# Every entry of the launch table at the largest head size it serves. float16 compiles like
# bfloat16; `python -m quire.kernels.compile_check` compiles all, in minutes.
CASES = [
    case
    for case in shipped_cases(head_sizes=(64, 128, 256), dtypes=(torch.bfloat16, torch.float32))
    if case.name in ("decode", "prefill")
    or (case.name == "decode_fp8" and case.size == 256 and case.dtype == torch.bfloat16)
    or case.name == "sample"
    or (case.size in (128, 8192, 14336) and case.dtype == torch.bfloat16)
]


def name(case: KernelCase) -> str:
    return f"{case.name}-{case.size}-{str(case.dtype)[6:]}-sm_{case.capability}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_shipped_kernel_compiles_without_fault(case: KernelCase) -> None:
    result = compile_case(case)
    assert result.faults() == []
    assert result.stack_bytes == 0
    assert result.registers <= 255
    if case.kernel is prefill_kernel and case.capability == 90 and case.dtype == torch.bfloat16:
        assert result.wgmma > 0


@pytest.mark.parametrize("case", list(shipped_cases()), ids=name)
def test_tiles_fit_the_splits_and_the_dot_product(case: KernelCase) -> None:
    if case.kernel in (decode_kernel, prefill_kernel):
        assert SPLIT_TOKENS % case.constants["BLOCK_N"] == 0
        assert case.constants["BLOCK_M"] >= 16


@pytest.mark.parametrize("head_size", [8, 48, 512])
def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one(head_size: int) -> None:
    with pytest.raises(ValueError, match=rf"head_size={head_size}: .*64, 80, 96, 128, 256"):
        launch_config("decode", head_size=head_size, dtype=torch.float16, capability=90)


def test_a_float8_cache_with_float32_queries_is_refused() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn KV cache with float32 queries"):
        launch_config(
            "decode",
            head_size=64,
            dtype=torch.float32,
            capability=90,
            cache_dtype=torch.float8_e4m3fn,
        )


def test_a_dtype_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.float64"):
        launch_config("prefill", head_size=64, dtype=torch.float64, capability=90)
