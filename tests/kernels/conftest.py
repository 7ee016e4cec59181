"""The native library for every instruction set that this CPU has."""

import ctypes
import shutil

import pytest

from quire.kernels import native


@pytest.fixture(scope="session", params=native.available_isas())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return native.load(request.param)
