"""The native CPU library: compiled when first needed, kept per user, loaded once per process.

One library per instruction set, best first: nothing is chosen while it runs, and code for a newer
machine cannot end up in a path for an older one. The file's name holds a hash of the sources, the
compiler and its flags, so a stale build is never loaded. Without a compiler the package works
without it. ``python -m quire.kernels.native`` compiles it ahead of the first use.

    QUIRE_NATIVE=0      never use it
    QUIRE_NATIVE_ISA    one of `ISA_FLAGS`, instead of the best that this CPU has
    QUIRE_CACHE_DIR     where builds are kept, instead of ~/.cache/quire
    CXX                 the compiler, instead of c++
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

# torch brings the OpenMP runtime. Loaded first, it is the only one of the process.
import torch  # noqa: F401

from quire.kernels import native_abi

logger = logging.getLogger(__name__)

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


class BuildError(Exception):
    """The library could not be compiled; the message is for a person."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this CPU, or ``None`` where there is none: said once, in the log.

    Raises:
        ValueError: ``QUIRE_NATIVE_ISA`` names no instruction set of this CPU.
    """
    if os.environ.get("QUIRE_NATIVE", "1") == "0":
        return None
    isa = os.environ.get("QUIRE_NATIVE_ISA") or available_isas()[0]
    try:
        return load(isa)
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels run in plain PyTorch, several times slower: %s", error)
        return None


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
    loaded = ctypes.CDLL(str(build(isa)))
    native_abi.declare(loaded)
    return loaded


@functools.cache
def available_isas() -> tuple[str, ...]:
    """The instruction sets of this CPU, best first; the last is always "portable"."""
    flags: set[str] = set()
    if platform.machine() in ("x86_64", "AMD64"):
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return tuple(isa for isa in ISA_FLAGS if isa == "portable" or _CPU_FLAGS[isa] <= flags)


def build(isa: str) -> Path:
    """The compiled library; compiles only what is not in the cache."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler {compiler[0]!r}; install g++ 11 or newer, or set CXX")
    flags = [*_FLAGS, *ISA_FLAGS[isa]]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(repr((compiler, version, flags)).encode())
    sources = sorted(_SOURCES.iterdir())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    target = _cache_dir() / f"native-{isa}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Ranks start together: one compiles, the others wait for what it makes.
        lock = os.open(target.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                logger.info("compiling the CPU kernels for %s, once: %s", isa, target)
                _build_into(target, compiler, flags, sources)
        finally:
            os.close(lock)
    return target


def _build_into(target: Path, compiler: list[str], flags: list[str], sources: list[Path]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        units = [source for source in sources if source.suffix == ".cpp"]
        os.replace(_compile(compiler, flags, units, Path(scratch)), target)


def _compile(compiler: list[str], flags: list[str], units: list[Path], scratch: Path) -> Path:
    """All units at once, each in a process of its own, then the link."""
    objects = [scratch / f"{unit.stem}.o" for unit in units]
    commands = [
        [*compiler, *flags, "-c", str(unit), "-o", str(out)]
        for unit, out in zip(units, objects, strict=True)
    ]
    out = scratch / "native.so"
    _run_all(commands)
    _run_all([[*compiler, *flags, "-shared", *map(str, objects), "-o", str(out)]])
    return out


def _run_all(commands: list[list[str]]) -> None:
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        for command in commands
    ]
    outputs = [process.communicate()[1] for process in processes]
    for command, process, output in zip(commands, processes, outputs, strict=True):
        if process.returncode:
            first = next((line for line in output.splitlines() if "error" in line), output[:300])
            raise BuildError(f"{shlex.join(command)} failed: {first.strip()}")


def _cache_dir() -> Path:
    chosen = os.environ.get("QUIRE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "quire"
    except RuntimeError as error:
        raise BuildError("no home directory to keep the build in; set QUIRE_CACHE_DIR") from error


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    library()
