"""Python bindings of `native/chain.cpp`, for CPUs with SHA instructions if a compiler is installed.

``python -m quire.worker.blocks.native_hashing`` compiles it before the first use.
"""

import ctypes
import functools
import logging
from ctypes import c_int64
from pathlib import Path

from quire import native_build, native_header

CHAIN_BYTES = 8 * 4 + 8 + 64
"""Size of a ``Chain``."""
CHUNK_BYTES = 64
BLOCK_BYTES_MULTIPLE = 16

_SOURCES = Path(__file__).parent / "native"
_CPU_FLAGS = {"sha_ni", "sse4_1", "ssse3"}
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-msha", "-msse4.1")


@functools.cache
def library() -> ctypes.PyDLL | None:
    """The library, or ``None`` if it is not available; hashlib is then used, ten times slower."""
    if _CPU_FLAGS - native_build.cpu_flags():
        return None
    return native_build.load_or_do_without(_load, without="prompts are hashed by hashlib, slower")


def _load() -> ctypes.PyDLL:
    # PyDLL keeps the GIL: releasing it and waiting for it again costs more than most calls.
    loaded = ctypes.PyDLL(str(build()))
    num_bytes = c_int64.in_dll(loaded, "quire_chain_bytes").value
    if num_bytes != CHAIN_BYTES:
        raise RuntimeError(f"Chain has {num_bytes} bytes in chain.cpp, {CHAIN_BYTES} here")
    native_header.read(_SOURCES / "chain.cpp").declare(loaded)
    return loaded


def build() -> Path:
    """Compiles the library and returns its path, as `quire.native_build.build` does."""
    return native_build.build("hashing", sources=_SOURCES, flags=_FLAGS)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    library()
