"""The native CPU library: brought by a wheel or compiled when first needed, and loaded once per
process.

One library per instruction set, best first: nothing is chosen while it runs, and code for a newer
machine cannot end up in a path for an older one. Without a compiler the package works without it.
``python -m quire.kernels.native`` compiles it ahead of the first use. `quire.native_build` says
where builds are kept, and names the variables of the environment that it reads; one more is

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
"""Best first. `portable` is what the compiler takes for granted on this machine."""

_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_CPU_FLAGS = {
    "avx512_bf16": {*_AVX512, "avx512_bf16", "avx512_vnni"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
}
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp"),
    # A fused multiply-add where the source says so and nowhere else: bits must not depend on
    # what the compiler inlines where.
    *("-ffp-contract=off", "-fno-math-errno"),
)
_SOURCES = Path(__file__).parent / "native"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this CPU, or ``None`` where there is none: said once, in the log.

    Raises:
        ValueError: ``QUIRE_NATIVE_ISA`` names no instruction set of this CPU.
    """
    isa = os.environ.get("QUIRE_NATIVE_ISA") or available_isas()[0]
    return native_build.load_or_do_without(
        lambda: load(isa), without="CPU kernels run in plain PyTorch, several times slower"
    )


def build_name() -> str:
    """The loaded library's instruction set and the hashes of what it was built from."""
    loaded = library()
    assert loaded is not None
    return Path(loaded._name).stem.removeprefix("native-")


def load(isa: str) -> ctypes.CDLL:
    """The library for one instruction set, compiled if it has not been.

    Raises:
        ValueError: This CPU lacks it.
        BuildError: It cannot be compiled.
        OSError: It cannot be stored or loaded.
    """
    if isa not in available_isas():
        raise ValueError(
            f"QUIRE_NATIVE_ISA={isa!r}: this CPU can run {', '.join(available_isas())}"
        )
    # torch brings the OpenMP runtime. Loaded first, it is the only one of the process. It is not
    # imported above because a wheel is built, by `build` alone, where there is no torch.
    import torch  # noqa: F401

    from quire.kernels import native_abi

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
