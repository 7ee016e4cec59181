"""Under `make sanitize`, an out-of-bounds access in our C++ ends the process with its location.

These tests call the library directly, since the checks in Python would refuse their arguments.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIRECTORY = """
import sys
from quire.router.prefix_index import native_index as native_holders
library = native_holders.library() or sys.exit("no library")
index = library.quire_holders_new(10)
library.quire_holders_admit(index, 0)
print("begins", flush=True)
library.quire_holders_clear(index, 1)
"""
HASHING = """
import ctypes
import sys
from quire.worker.blocks import native_hashing
library = native_hashing.library() or sys.exit("no library")
chain = ctypes.create_string_buffer(native_hashing.CHAIN_BYTES)
library.quire_chain_begin(chain, bytes(64))
memory = ctypes.CDLL(None)
memory.malloc.restype = ctypes.c_void_p
print("begins", flush=True)
library.quire_chain_extend(chain, memory.malloc(ctypes.c_size_t(64)), 64, 2, bytes(64))
"""
KERNELS = """
import sys
import torch
from quire.kernels.native import library as native, abi as native_abi
library = native.library() or sys.exit("no library")
x = torch.zeros(64)
out = torch.zeros(1, dtype=torch.int64)
arguments = native_abi.ArgmaxArgs(x.data_ptr(), 64, out.data_ptr(), 1, 65)
print("begins", flush=True)
library.quire_argmax(arguments, 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [DIRECTORY, HASHING, KERNELS], ids=["directory", "hashing", "kernels"]
)
def test_an_access_out_of_bounds_is_reported(program: str) -> None:
    if program is KERNELS and not os.environ.get("QUIRE_NATIVE_SANITIZE"):
        pytest.skip("compiles for a minute: in `make sanitize`")
    outcome = _run(program)
    if "no library" in outcome.stderr:
        pytest.skip("no library on this machine")
    assert outcome.stdout == "begins\n"
    assert outcome.returncode != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in outcome.stderr


def _run(program: str) -> subprocess.CompletedProcess[str]:
    try:
        asked = ["c++", "-print-file-name=libasan.so"]
        runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C++ compiler")
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "QUIRE_NATIVE_SANITIZE": "address,undefined",
    }
    environment.pop("QUIRE_NATIVE", None)
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
