"""The PTX interpreter on trivial kernels, against torch.

Some of these instructions are not used by kernels of `quire.kernels`, or not yet.
"""

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton to be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "TRITON_INTERPRET=1 turns the compiler off: run this file in a process without it",
        allow_module_level=True,
    )

import triton
import triton.language as tl
from tools.ptx import machine
from tools.ptx.emulate import emulated
from tools.ptx.machine import Fault

from quire.kernels.triton.launch import compiler_options

CAPABILITIES = (80, 90)
OPTIONS = compiler_options(num_warps=4)


def jit(function: Any) -> Any:
    return triton.jit(function)


@jit
def convert_kernel(x_ptr, y_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    x = tl.load(x_ptr + places)
    tl.store(y_ptr + places, x.to(y_ptr.dtype.element_ty))


def floats(count: int) -> torch.Tensor:
    """Numbers of every magnitude, including ties between float8 numbers."""
    rng = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=rng) * torch.exp2(
        torch.randint(-12, 8, (count,), generator=rng)
    )
    steps = torch.arange(count // 2) / 2048
    return torch.cat([x[: count - len(steps)], steps])


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((source, target) for source in FLOATS for target in FLOATS if source != target),
        *((torch.float8_e5m2, target) for target in FLOATS),
        (torch.float32, torch.int32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float64),
        (torch.int8, torch.bfloat16),
    ],
    ids=str,
)
def test_a_conversion_is_that_of_torch(
    source: torch.dtype, target: torch.dtype, capability: int
) -> None:
    x = floats(1024).to(source)
    y = torch.zeros(1024, dtype=target)
    with emulated(capability):
        convert_kernel[(1,)](x, y, N=1024, **OPTIONS)
    assert torch.equal(y.double(), x.to(target).double())


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("other", FLOATS, ids=str)
def test_float8_with_four_bits_of_exponent_is_that_of_torch(
    other: torch.dtype, capability: int
) -> None:
    x = floats(1024).clamp(-448, 448).to(other)
    y, back = torch.zeros(1024, dtype=torch.float8_e4m3fn), torch.zeros(1024, dtype=other)
    with emulated(capability):
        convert_kernel[(1,)](x, y, N=1024, **OPTIONS)
        convert_kernel[(1,)](y, back, N=1024, **OPTIONS)
    assert torch.equal(y.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(back, y.to(other))


@jit
def histogram_kernel(x_ptr, counts_ptr, N: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.atomic_add(counts_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))


@jit
def scatter_kernel(x_ptr, counts_ptr, first_ptr, N: tl.constexpr):
    places = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + places)
    tl.atomic_add(counts_ptr + x, 1)
    tl.atomic_min(first_ptr + x, places)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_histograms_are_those_of_torch(capability: int) -> None:
    x = torch.randint(0, 64, (4 * 512,), generator=torch.Generator().manual_seed(0)).int()
    counts, more = torch.zeros(2, 64, dtype=torch.int32)
    first = torch.full((64,), 1 << 30, dtype=torch.int32)
    with emulated(capability):
        histogram_kernel[(4,)](x, counts, N=512, BINS=64, **OPTIONS)
        scatter_kernel[(4,)](x, more, first, N=512, **OPTIONS)
    want = torch.bincount(x, minlength=64)
    assert torch.equal(counts.long(), want)
    assert torch.equal(more.long(), want)
    assert first.tolist() == [int((x == value).nonzero()[0]) for value in range(64)]


@jit
def last_kernel(x_ptr, parts_ptr, turns_ptr, out_ptr, N: tl.constexpr, PARTS: tl.constexpr):
    part = tl.program_id(0)
    tl.store(parts_ptr + part, tl.sum(tl.load(x_ptr + part * N + tl.arange(0, N)), 0))
    if tl.atomic_add(turns_ptr, 1) == PARTS - 1:
        tl.store(out_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, PARTS)), 0))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_last_program_of_several_may_add_up_what_all_left(capability: int) -> None:
    x = torch.arange(8 * 256, dtype=torch.int32)
    parts, turns, out = (torch.zeros(size, dtype=torch.int32) for size in (8, 1, 1))
    with emulated(capability):
        last_kernel[(8,)](x, parts, turns, out, N=256, PARTS=8, **OPTIONS)
    assert out.item() == x.sum()


@jit
def rows_kernel(x_ptr, sums_ptr, sorted_ptr, best_ptr, N: tl.constexpr):
    places = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + places)
    tl.store(sums_ptr + places, tl.cumsum(x, 0))
    tl.store(sorted_ptr + places, tl.sort(x))
    tl.store(best_ptr + tl.program_id(0), tl.argmax(x, 0))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
def test_scans_and_sorts_are_those_of_torch(dtype: torch.dtype, capability: int) -> None:
    x = torch.randperm(3 * 256, generator=torch.Generator().manual_seed(0)).to(dtype).view(3, 256)
    sums, ordered = torch.zeros(2, 3, 256, dtype=dtype)
    best = torch.zeros(3, dtype=torch.int32)
    with emulated(capability):
        rows_kernel[(3,)](x, sums, ordered, best, N=256, **OPTIONS)
    assert torch.equal(sums, x.cumsum(1).to(dtype))
    assert torch.equal(ordered, x.sort(1)[0])
    assert torch.equal(best.long(), x.argmax(1))


@jit
def product_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[:, None] * K + k[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b.T).to(c_ptr.dtype.element_ty))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("m", [16, 128])
def test_a_product_is_that_of_torch(m: int, dtype: torch.dtype, capability: int) -> None:
    check_product(m, dtype, capability)


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("m", [16, 128])
def test_a_product_of_float8_is_that_of_torch(m: int, capability: int) -> None:
    check_product(m, torch.float8_e4m3fn, capability)


def check_product(m: int, dtype: torch.dtype, capability: int) -> None:
    rng = torch.Generator().manual_seed(m)
    # Small integers: no order of summation changes the sum.
    a, b = (torch.randint(-8, 8, (size, 64), generator=rng).to(dtype) for size in (m, 64))
    c = torch.zeros(m, 64, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    with emulated(capability):
        product_kernel[(1,)](a, b, c, M=m, N=64, K=64, **OPTIONS)
    assert torch.equal(c.double(), a.double() @ b.double().T)


@jit
def collatz_kernel(x_ptr, steps_ptr):
    x = tl.load(x_ptr + tl.program_id(0))
    steps = 0
    while x > 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps += 1
    tl.store(steps_ptr + tl.program_id(0), steps)


def test_programs_go_their_own_ways() -> None:
    x = torch.arange(1, 40)
    steps = torch.zeros(39, dtype=torch.int32)
    with emulated(90):
        collatz_kernel[(39,)](x, steps, **OPTIONS)
    want = []
    for start in x.tolist():
        count, value = 0, start
        while value > 1:
            value, count = value // 2 if value % 2 == 0 else 3 * value + 1, count + 1
        want.append(count)
    assert steps.tolist() == want


@jit
def chase_kernel(flag_ptr, out_ptr):
    # Program 0 loops until program 1, which comes later, has added to the flag.
    while (tl.program_id(0) == 0) & (tl.atomic_add(flag_ptr, 0) == 0):
        pass
    tl.store(out_ptr + tl.program_id(0), 1)
    tl.atomic_add(flag_ptr, tl.program_id(0))


def test_a_program_that_waits_keeps_none_from_running() -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with emulated(90):
        chase_kernel[(2,)](flag, out, **OPTIONS)
    assert out.tolist() == [1, 1]


def test_an_access_past_a_tensors_end_names_kernel_tensor_and_instruction() -> None:
    whole = torch.zeros(1024)
    with (
        pytest.raises(
            Fault, match=r"convert_kernel: .*ld\.global.*out of bounds; nearest is x_ptr"
        ),
        emulated(90),
    ):
        convert_kernel[(1,)](whole[:512], torch.zeros(1024), N=1024, **OPTIONS)


def test_a_kernel_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_BLOCKS", 1000)
    with pytest.raises(Fault, match="wait_kernel: hangs"), emulated(90):
        wait_kernel[(1,)](torch.zeros(1, dtype=torch.int32), **OPTIONS)


@jit
def wait_kernel(flag_ptr):
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass


def test_an_unknown_opcode_is_named() -> None:
    def edit(ptx: str) -> str:
        return ptx.replace("st.global", "tcgen05.st.global")

    with (
        pytest.raises(NotImplementedError, match=r"opcode tcgen05\.st\.global"),
        emulated(90, edits={"convert_kernel": edit}),
    ):
        convert_kernel[(1,)](torch.zeros(64), torch.zeros(64), N=64, **OPTIONS)
