"""Loads the native CPU library, which a wheel contains or which is compiled at its first use.

There is one library per instruction set, and the best one is loaded once per process. So there is
no dispatch at run time, and no code for a newer machine can end up in a path for an older one.
Without a compiler, the package works without the library.
``python -m quire.kernels.native.library`` compiles it ahead of the first use. `quire.native_build`
documents where builds are stored and the environment variables that it reads; one more is

    QUIRE_NATIVE_ISA    one of `ISA_FLAGS`, instead of the best that this CPU has
"""

import ctypes
import functools
import logging
import os
from pathlib import Path

from quire import native_build

ISA_FLAGS = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}
"""Compiler flags by instruction set, best first; `portable` is the compiler's default target."""

_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_CPU_FLAGS = {
    "avx512_bf16": {*_AVX512, "avx512_bf16", "avx512_vnni"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
}
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp"),
    # Fused multiply-add only where the source has one: bits must not depend on what the compiler
    # inlines.
    *("-ffp-contract=off", "-fno-math-errno"),
)
_SOURCES = Path(__file__).parent


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this CPU, or ``None`` if there is none, which is logged once.

    Raises:
        ValueError: ``QUIRE_NATIVE_ISA`` names no instruction set of this CPU.
    """
    isa = os.environ.get("QUIRE_NATIVE_ISA") or available_isas()[0]
    return native_build.load_or_do_without(
        lambda: load(isa), without="CPU kernels run in plain PyTorch, several times slower"
    )


def build_name() -> str:
    """The loaded library's instruction set and the hashes of its sources."""
    loaded = library()
    assert loaded is not None
    return Path(loaded._name).stem.removeprefix("native-")


def load(isa: str) -> ctypes.CDLL:
    """The library for one instruction set, compiled if necessary.

    Raises:
        ValueError: This CPU lacks the instruction set.
        BuildError: It cannot be compiled.
        OSError: It cannot be stored or loaded.
    """
    if isa not in available_isas():
        raise ValueError(
            f"QUIRE_NATIVE_ISA={isa!r}: this CPU can run {', '.join(available_isas())}"
        )
    # torch contains the OpenMP runtime; loaded first, it is the only one in the process. The import
    # is not at the top because `build` runs without torch when a wheel is built.
    import torch  # noqa: F401

    from quire.kernels.native import abi as native_abi

    loaded = ctypes.CDLL(str(build(isa)))
    native_abi.declare(loaded)
    return loaded


@functools.cache
def available_isas() -> tuple[str, ...]:
    """The instruction sets of this CPU, best first; the last is always "portable"."""
    flags = native_build.cpu_flags()
    return tuple(isa for isa in ISA_FLAGS if isa == "portable" or _CPU_FLAGS[isa] <= flags)


def build(isa: str) -> Path:
    """See `quire.native_build.build`."""
    return native_build.build(f"native-{isa}", sources=_SOURCES, flags=[*_FLAGS, *ISA_FLAGS[isa]])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    library()
