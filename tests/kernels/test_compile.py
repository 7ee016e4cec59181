"""The shipped kernels compile for an A100 and an H100, tested without either GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton to be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "TRITON_INTERPRET=1 turns the compiler off: run this file in a process without it",
        allow_module_level=True,
    )

from tools.kernels.compile_cases import KernelCase, shipped_cases
from tools.kernels.compile_check import all_cases, compile_all, compile_case

from quire.kernels.triton.decode import decode_kernel
from quire.kernels.triton.launch import SHARED_PAIRS, SPLIT_TOKENS, launch_config
from quire.kernels.triton.prefill import prefill_kernel

NUM_PARTS = 4
"""Parts of the test: as one, it could exceed a test's time limit on a busy machine."""


def name(case: KernelCase) -> str:
    return f"{case.name}-{case.size}-{str(case.dtype)[6:]}-sm_{case.capability}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_shipped_kernel_compiles_without_fault(part: int) -> None:
    """Checks the code for sm_80 and sm_90; for Blackwell and AMD only that it compiles."""
    # Each process takes half a gigabyte, which limits their number.
    num_processes = min(8, len(os.sched_getaffinity(0)))
    compiled = compile_all(num_processes=num_processes, part=part, num_parts=NUM_PARTS)
    faults = {name(case): result.faults(case) for case, result in compiled}
    assert {case: found for case, found in faults.items() if found} == {}
    assert list(faults) == [name(case) for case in all_cases()[part::NUM_PARTS]]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_a_decode_loads_a_tile_while_it_computes_with_another(capability: int) -> None:
    cases = shipped_cases(head_sizes=(128,), dtypes=(torch.bfloat16,), capabilities=(capability,))
    for case in cases:
        if case.name in ("decode", "decode_fp8"):
            compiled = compile_case(case)
            assert compiled.tile_bytes > 0
            assert compiled.shared_bytes >= 2 * 2 * compiled.tile_bytes  # of K and of V


@pytest.mark.quick_cells(100)
@pytest.mark.parametrize("case", list(shipped_cases()), ids=name)
def test_tiles_fit_the_splits_and_the_dot_product(case: KernelCase) -> None:
    constants = case.launch(compiles=False).constants
    if case.kernel in (decode_kernel, prefill_kernel):
        assert SPLIT_TOKENS % constants["BLOCK_N"] == 0
        assert constants["BLOCK_M"] >= 16
    if case.kernel is decode_kernel:  # Shared prefixes are read in tiles of the same shape.
        assert constants["BLOCK_M"] == SHARED_PAIRS


@pytest.mark.slow
def test_a_case_is_what_its_launcher_starts() -> None:
    """If the vocabulary is a multiple of 16, rows are aligned and loaded four values at once."""
    samples = {case.size: case for case in shipped_cases() if case.name == "sample"}
    loads = {
        size: case.launch().compiled.asm["ptx"].count("ld.global.v4")
        for size, case in samples.items()
    }
    assert [bool(loads[size]) for size in sorted(loads, key=lambda size: size % 16)] == [
        True,
        False,
    ]


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
