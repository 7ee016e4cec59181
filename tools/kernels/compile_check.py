"""Compiles every shipped kernel for every supported GPU, without a GPU, and checks the result.

    python -m tools.kernels.compile_check [--processes N]

prints registers, stack, shared memory and tensor-core instructions of each. A kernel on the stack
spills registers to memory and is several times slower; one without tensor-core instructions is
ten times slower; one that needs more shared memory than a block may have does not start at all; a
decode with one buffer for K and V does not load the next tile while it computes. The exit status is
1 if a kernel has such a fault.

One process per core compiles. Because of Triton's cache on disk, a second run takes seconds.
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
from tools.kernels.captured import Launch
from tools.kernels.compile_cases import KernelCase, portable_cases, shipped_cases

from quire.kernels.triton.decode import decode_kernel
from quire.kernels.triton.experts import experts_kernel
from quire.kernels.triton.grouped import grouped_kernel
from quire.kernels.triton.launch import AMD_CAPABILITY
from quire.kernels.triton.low_rank import shrink_kernel
from quire.kernels.triton.prefill import prefill_kernel
from quire.kernels.triton.shared import shared_kernel

_SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory of a block in bytes, for the GPUs whose kernels are checked."""
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_DECODE_KERNELS = (decode_kernel, shared_kernel)
_MATRIX_KERNELS = (
    *(*_DECODE_KERNELS, prefill_kernel),
    *(experts_kernel, grouped_kernel, shrink_kernel),
)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The properties of a case's compiled code. Zeros for AMD, whose code is not analysed."""

    num_warps: int
    registers: int = 0
    stack_bytes: int = 0
    """Stack bytes, for spilled registers and arrays not in registers; should be 0."""
    shared_bytes: int
    wgmma: int = 0
    """Warp-group matrix instructions, which only sm_90 has."""
    mma: int = 0
    """Matrix instructions of one warp."""
    tile_bytes: int = 0
    """Bytes of K, or of V, in one step of a decode's loop."""

    @property
    def is_pipelined(self) -> bool:
        """Whether a decode has two buffers of K and of V."""
        return self.shared_bytes >= 4 * self.tile_bytes

    def faults(self, case: KernelCase) -> list[str]:
        """The reasons why the kernel fails or is slow; empty if there are none, or if the GPU is
        unknown."""
        if case.capability not in _SHARED_LIMIT:
            return []
        faults = []
        if self.stack_bytes:
            faults.append(f"{self.stack_bytes} bytes of stack: use a smaller tile or more warps")
        if self.shared_bytes > _SHARED_LIMIT[case.capability]:
            limit = _SHARED_LIMIT[case.capability]
            faults.append(f"{self.shared_bytes} bytes of shared memory, the limit is {limit}")
        halves = case.dtype != torch.float32
        if case.capability == 100:  # has instructions of its own, which are not counted
            return faults
        if halves and case.kernel is prefill_kernel and case.capability == 90:
            if not self.wgmma:
                faults.append("no wgmma: block_m must be a multiple of 64")
        elif halves and case.kernel in _MATRIX_KERNELS and not (self.mma or self.wgmma):
            faults.append("no tensor-core instructions")
        if halves and not self.is_pipelined:
            faults.append("one buffer for K and V: every load is waited for, use more stages")
        return faults


@cache
def all_cases() -> tuple[KernelCase, ...]:
    """The shipped and the portable cases, in a fixed order."""
    return (*shipped_cases(), *portable_cases())


def compile_all(
    *, num_processes: int | None = None, part: int = 0, num_parts: int = 1
) -> Iterator[tuple[KernelCase, Compiled]]:
    """Compiles `all_cases` in order, in one process per core unless ``num_processes`` is given.

    The cases are divided into ``num_parts`` parts of equal size, plus or minus one case; only part
    number ``part`` is compiled.
    """
    numbers = range(part, len(all_cases()), num_parts)
    # Launchers cannot be pickled, so a process receives a case's number.
    with ProcessPoolExecutor(
        num_processes or os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for number, compiled in zip(numbers, pool.map(_compile_number, numbers), strict=True):
            yield all_cases()[number], compiled


def _compile_number(number: int) -> Compiled:
    return compile_case(all_cases()[number])


def compile_case(case: KernelCase) -> Compiled:
    """Compiles a case, in a second or two. Needs no GPU."""
    launch = case.launch()
    compiled = launch.compiled
    metadata = compiled.metadata
    if case.capability == AMD_CAPABILITY:
        return Compiled(num_warps=metadata.num_warps, shared_bytes=metadata.shared)
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        num_warps=metadata.num_warps,
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=metadata.shared,
        wgmma=compiled.asm["ptx"].count("wgmma.mma_async"),
        mma=compiled.asm["ptx"].count("mma.sync"),
        tile_bytes=_tile_bytes(launch) if case.kernel in _DECODE_KERNELS else 0,
    )


def _tile_bytes(launch: Launch) -> int:
    item_bytes = int(launch.arguments["k_ptr"].dtype.itemsize)
    return int(launch.constants["BLOCK_N"] * launch.constants["BLOCK_D"]) * item_bytes


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and so on, from the `cuobjdump` in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kernels.compile_check")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    print("kernel         size  dtype   sm  warps  registers  stack  shared  wgmma  mma")
    failed = False
    for case, result in compile_all(num_processes=parser.parse_args().processes):
        faults = result.faults(case)
        failed |= bool(faults)
        print(
            f"{case.name:<13} {case.size:>5}  {_DTYPES[case.dtype]:<5} "
            f"{case.capability:>4} {result.num_warps:>6} {result.registers:>10} "
            f"{result.stack_bytes:>6} {result.shared_bytes:>7} {result.wgmma:>6} "
            f"{result.mma:>4}  {'; '.join(faults)}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
