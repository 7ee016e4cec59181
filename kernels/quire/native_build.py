"""Compiles our C++ libraries when they are first needed, and keeps them per user.

For every part that has one (`quire.kernels.native`, `quire.worker.native_hashing`,
`quire.router.native_holders`), which is why it belongs to none of them. The file's name holds a
hash of the sources, the compiler and its flags, so a stale build is never loaded.

    QUIRE_NATIVE=0      use no compiled library at all
    QUIRE_CACHE_DIR     where builds are kept, instead of ~/.cache/quire
    CXX                 the compiler, instead of c++
"""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BuildError(Exception):
    """The library could not be compiled; the message is for a person."""


def load_or_do_without(load: Callable[[], T], *, without: str) -> T | None:
    """What ``load`` returns, or ``None`` where the library cannot be had or is not wanted.

    ``without`` is what the log then says of the loss.
    """
    if os.environ.get("QUIRE_NATIVE", "1") == "0":
        return None
    try:
        return load()
    except (BuildError, OSError) as error:
        logger.warning("%s: %s", without, error)
        return None


def build(name: str, *, sources: Path, flags: Sequence[str]) -> Path:
    """The library of all files in the folder ``sources``; compiles only what is not in the cache.

    Raises:
        BuildError: It cannot be compiled.
        OSError: It cannot be stored.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler {compiler[0]!r}; install g++ 11 or newer, or set CXX")
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(repr((compiler, version, list(flags))).encode())
    files = sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    target = _cache_dir() / f"{name}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Processes start together: one compiles, the others wait for what it makes.
        lock = os.open(target.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                logger.info("compiling %s, once: %s", name, target)
                _build_into(target, compiler, flags, files)
        finally:
            os.close(lock)
    return target


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What Linux says that an x86-64 CPU can do; nothing on any other."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _build_into(target: Path, compiler: list[str], flags: Sequence[str], files: list[Path]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        units = [file for file in files if file.suffix == ".cpp"]
        os.replace(_compile(compiler, flags, units, Path(scratch)), target)


def _compile(compiler: list[str], flags: Sequence[str], units: list[Path], scratch: Path) -> Path:
    """All units at once, each in a process of its own, then the link."""
    objects = [scratch / f"{unit.stem}.o" for unit in units]
    commands = [
        [*compiler, *flags, "-c", str(unit), "-o", str(out)]
        for unit, out in zip(units, objects, strict=True)
    ]
    out = scratch / "library.so"
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
