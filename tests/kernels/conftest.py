"""Fixture ``library``: the native library for each instruction set that this CPU has.

``QUIRE_NATIVE_ISA`` restricts tests to one of them. Under a sanitizer (`make sanitize`) each packed
weight and each buffer ends at the end of its allocation, so that reads beyond it are detected.

All tests of this folder are proofs (`tests.proofs`): they depend on kernels and tools alone.
"""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from quire.kernels.native import library as native
from quire.kernels.native import linear as native_linear

FOLDER = Path(__file__).parent
ISAS = [
    pytest.param(isa, marks=[pytest.mark.slow] if number else [])
    for number, isa in enumerate(native.available_isas())
]
"""All but the best are slow: the first use on a machine compiles each of them for a minute."""


@pytest.fixture(scope="session", params=ISAS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return native.load(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.proof)
    chosen = os.environ.get("QUIRE_NATIVE_ISA")
    if chosen:
        others = native.ISA_FLAGS.keys() - {chosen}
        items[:] = [item for item in items if others.isdisjoint(_parameters(item))]


def _parameters(item: pytest.Item) -> set[str]:
    call = getattr(item, "callspec", None)
    return set() if call is None else {x for x in call.params.values() if isinstance(x, str)}


@pytest.fixture(scope="session", autouse=True)
def _memory_that_ends() -> None:
    if os.environ.get("QUIRE_NATIVE_SANITIZE"):
        native_linear._CHUNK_BYTES = 0
        native_linear._HUGE_PAGE_BYTES = 1
