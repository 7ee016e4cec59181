"""The PTX that Triton compiles for an A100 and an H100 is right, tested without either GPU.

`tools.ptx` interprets the PTX. Each kernel equals its plain-PyTorch twin there, and a fault planted
in the PTX is detected, which shows that the comparison works. `python -m tools.ptx` runs more.
"""

import os
import re
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="the kernels need triton to be compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "TRITON_INTERPRET=1 turns the compiler off: run this file in a process without it",
        allow_module_level=True,
    )

from tools.kernels.compile_cases import shipped_cases
from tools.ptx.cases import CAPABILITIES, Case, all_cases
from tools.ptx.machine import Fault

CASES = {case.name: case for case in all_cases()}
QUICK = [case for case in CASES.values() if case.is_quick]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name.replace(" ", "_"))
def test_a_compiled_kernel_is_its_twin(case: Case, capability: int) -> None:
    case.run(capability)


def test_every_shipped_kernel_is_run() -> None:
    run = {kernel for case in QUICK for kernel in case.kernels}
    assert run == {str(case.kernel.__name__) for case in shipped_cases()}


def replaced(
    pattern: str, replacement: str | Callable[[re.Match[str]], str]
) -> Callable[[str], str]:
    def edit(ptx: str) -> str:
        edited, found = re.subn(pattern, replacement, ptx)
        if not found:
            raise LookupError(f"no {pattern} in the PTX")
        return edited

    return edit


FAULTS: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "scores of tokens that no query may see": (
        r"selp\.f32\s+(\S+), (?:(%r\d+), 0fFF800000|0fFF800000, (%r\d+)), %p\d+",
        r"mov.b32 \1, \2\3",
    ),
    "copies of tokens that are not there": (r"selp\.b32(\s+%r\d+), 16, 0, %p\d+", r"mov.b32\1, 16"),
    "loads past the end": (r"@%p\d+ (ld\.global)", r"\1"),
    "stores past the end": (r"@%p\d+ (st\.global)", r"\1"),
    "bounds one too high": (r"setp\.lt\.([su]32)", r"setp.le.\1"),
    "a wait for one copy less": (
        r"cp\.async\.wait_group\s+(\d+)",
        lambda found: f"cp.async.wait_group {int(found[1]) + 1}",
    ),
    "matrices turned": (r"(ldmatrix.*\.x4)\.shared", r"\1.trans.shared"),
    "no barriers": (r"bar\.sync\s+0;", ""),
    "a sum over the wrong lanes": (r"(shfl\.sync\.bfly\.b32.*), 2, 31", r"\1, 1, 31"),
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace(" ", "_"))
def test_a_planted_fault_is_noticed(fault: str, kind: str, capability: int) -> None:
    edits = {f"{kind}_kernel": replaced(*FAULTS[fault])}
    with pytest.raises((AssertionError, Fault)):
        CASES[kind].run(capability, edits=edits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "capability", "pattern", "replacement"),
    [
        ("decode", 80, r"(ldmatrix.*)\.trans", r"\1"),
        ("prefill", 80, r"(ldmatrix.*)\.trans", r"\1"),
        ("decode", 90, r"(stmatrix.*\.x4)\.shared", r"\1.trans.shared"),
        ("sample 300", 80, r"bar\.sync\s+0;", ""),
        ("prefill", 90, r"(wgmma\.wait_group\S*)\s+0", r"\1 1"),
    ],
)
def test_a_fault_in_what_one_kernel_alone_has_is_noticed(
    case: str, capability: int, pattern: str, replacement: str
) -> None:
    kernel = f"{case.partition(' ')[0]}_kernel"
    with pytest.raises((AssertionError, Fault)):
        CASES[case].run(capability, edits={kernel: replaced(pattern, replacement)})
