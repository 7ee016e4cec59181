"""Compiles every shipped kernel for every supported GPU, without one, and reads what came out.

    python -m quire.kernels.compile_check [--processes N]

prints registers, stack, shared memory and tensor-core instructions of each. A kernel on the stack
spills registers to memory and is several times slower; one without tensor-core instructions is
ten times slower; one that wants more shared memory than a block may have does not start at all.
The exit status is 1 where a kernel has such a fault.

A process for each core compiles; Triton's cache on the disk makes a second run a matter of
seconds.
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.kernels.compile_cases import (
    AMD_CAPABILITY,
    KernelCase,
    portable_cases,
    shipped_cases,
)
from quire.kernels.triton_decode import decode_kernel
from quire.kernels.triton_prefill import prefill_kernel
from quire.kernels.triton_shared import shared_kernel

_SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
_TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_INDEX_TYPES = {
    "table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "shared_ptr": "*i32",
    "rows_ptr": "*i32",
    "splits_ptr": "*i32",
    "slots_ptr": "*i64",
    "parts_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    **dict.fromkeys(("scale_log2", "cap_scale", "v_scale", "k_factor", "v_factor"), "fp32"),
}
_ALIGNED_STRIDES = (
    *("q_stride", "k_stride", "v_stride"),
    *("x_stride", "residual_stride", "gate_up_stride"),
)
_UNALIGNED = (
    *("table_ptr", "seq_lens_ptr", "query_starts_ptr", "slots_ptr"),
    *("shared_ptr", "rows_ptr", "splits_ptr"),
)


_MATRIX_KERNELS = (decode_kernel, shared_kernel, prefill_kernel)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of a case. Zeros for AMD's, whose code is not read here."""

    registers: int = 0
    stack_bytes: int = 0
    """Registers spilled to memory, and arrays that found no register; 0 is right."""
    shared_bytes: int
    wgmma: int = 0
    """Warp-group matrix instructions, which only sm_90 has."""
    mma: int = 0
    """Matrix instructions of one warp."""

    def faults(self, case: KernelCase) -> list[str]:
        """What keeps the kernel from running well; empty where nothing does, or nothing is known
        of the GPU."""
        if case.capability not in _SHARED_LIMIT:
            return []
        faults = []
        if self.stack_bytes:
            faults.append(f"{self.stack_bytes} bytes of stack: use a smaller tile or more warps")
        if self.shared_bytes > _SHARED_LIMIT[case.capability]:
            limit = _SHARED_LIMIT[case.capability]
            faults.append(f"{self.shared_bytes} bytes of shared memory, the limit is {limit}")
        halves = case.dtype != torch.float32
        if halves and case.kernel is prefill_kernel and case.capability == 90:
            if not self.wgmma:
                faults.append("no wgmma: block_m must be a multiple of 64")
        elif halves and case.kernel in _MATRIX_KERNELS and not self.mma:
            faults.append("no tensor-core instructions")
        return faults


@cache
def all_cases() -> tuple[KernelCase, ...]:
    """The shipped cases and the portable ones, in an order that never changes."""
    return (*shipped_cases(), *portable_cases())


def compile_all(
    *, num_processes: int | None = None, part: int = 0, num_parts: int = 1
) -> Iterator[tuple[KernelCase, Compiled]]:
    """Compiles `all_cases` in their order, on every core unless ``num_processes`` says else.

    Of ``num_parts``, that differ by one case at most and together are all, only number ``part``.
    """
    numbers = range(part, len(all_cases()), num_parts)
    # Kernels do not pickle: a process is told a case's number.
    with ProcessPoolExecutor(
        num_processes or os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for number, compiled in zip(numbers, pool.map(_compile_number, numbers), strict=True):
            yield all_cases()[number], compiled


def _compile_number(number: int) -> Compiled:
    return compile_case(all_cases()[number])


def compile_case(case: KernelCase) -> Compiled:
    """Compiles a case, in a second or two. Needs no GPU."""
    arguments = case.kernel.arg_names
    signature = {name: _argument_type(name, case) for name in arguments}
    aligned = [
        (index,)
        for index, name in enumerate(arguments)
        if (name.endswith("_ptr") and name not in _UNALIGNED) or name in _ALIGNED_STRIDES
    ]
    is_amd = case.capability == AMD_CAPABILITY
    compiled = triton.compile(
        ASTSource(
            case.kernel,
            signature,
            constexprs=case.constants,
            attrs={index: [["tt.divisibility", 16]] for index in aligned},
        ),
        target=GPUTarget("hip", "gfx942", 64) if is_amd else GPUTarget("cuda", case.capability, 32),
        options=case.options,
    )
    if is_amd:
        return Compiled(shared_bytes=compiled.metadata.shared)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        wgmma=compiled.asm["ptx"].count("wgmma.mma_async"),
        mma=compiled.asm["ptx"].count("mma.sync"),
    )


def _argument_type(name: str, case: KernelCase) -> str:
    if name in case.constants:
        return "constexpr"
    if name in case.types:
        return case.types[name]
    if name in _INDEX_TYPES:
        return _INDEX_TYPES[name]
    return "*" + _TRITON_TYPES[case.dtype] if name.endswith("_ptr") else "i32"


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and so on, from the `cuobjdump` that Triton's wheel brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.compile_check")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    print("kernel         size  dtype   sm  warps  registers  stack  shared  wgmma  mma")
    failed = False
    for case, result in compile_all(num_processes=parser.parse_args().processes):
        faults = result.faults(case)
        failed |= bool(faults)
        print(
            f"{case.name:<13} {case.size:>5}  {_TRITON_TYPES[case.dtype]:<5} "
            f"{case.capability:>4} {case.options['num_warps']:>6} {result.registers:>10} "
            f"{result.stack_bytes:>6} {result.shared_bytes:>7} {result.wgmma:>6} "
            f"{result.mma:>4}  {'; '.join(faults)}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
