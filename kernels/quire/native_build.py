"""Finds our C++ libraries where a wheel brought them; else compiles them when first needed and
keeps them per user.

For every part that has one (`quire.kernels.native.library`, `quire.worker.blocks.native_hashing`,
`quire.router.prefix_index.native_index`), which is why it belongs to none of them. The file's name
holds two hashes, one of the sources and flags and one of the compiler: a stale build is never
loaded, and a wheel's is found by the first alone. Nor is a build loaded from the cache that another
user may have written: file and folder must be ours or root's, for nobody else to write.

    QUIRE_NATIVE=0      use no compiled library at all
    QUIRE_CACHE_DIR     where builds and digests are kept, instead of ~/.cache/quire
    CXX                 the compiler, instead of c++

and one for tests, which `make sanitize` sets together with the LD_PRELOAD that it needs:

    QUIRE_NATIVE_SANITIZE   what -fsanitize is to watch for, such as address,undefined
"""

import atexit
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import platform
import select
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREBUILT = Path(__file__).parent / "prebuilt"
"""What a wheel built with ``QUIRE_BUILD_NATIVE=1`` brings; elsewhere there is no such folder."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
    """The library of all files in the folder ``sources``; compiles only what is neither in the
    wheel nor in the cache.

    Raises:
        BuildError: It cannot be compiled.
        OSError: It cannot be stored.
    """
    flags = [*flags, *_sanitizer_flags()]
    files = sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h"))
    name = f"{name}-{_digest_of_inputs(flags, files)}"
    # A folder of the package itself, trusted as its Python is.
    prebuilt = next(PREBUILT.glob(f"{name}-*.so"), None)
    if prebuilt is not None:
        return prebuilt
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler {compiler[0]!r}; install g++ 11 or newer, or set CXX")
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(repr((compiler, version)).encode())
    target = _private(cache_dir()) / f"{name}-{digest.hexdigest()[:16]}.so"
    if not _is_trusted(target):
        # Processes start together: one compiles, the others wait for what it makes.
        lock = os.open(target.parent, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_trusted(target):
                if target.exists():
                    logger.warning("%s is not only ours to write: compiling it again", target)
                begun = time.monotonic()
                logger.info("compiling %s", target.stem)
                _build_into(target, compiler, flags, files)
                # A warning: somebody waited, and a program without logging shows nothing less.
                logger.warning(
                    "compiled in %.1f s, kept for later starts: %s",
                    time.monotonic() - begun,
                    target,
                )
        finally:
            os.close(lock)
    return target


def cpu_flags() -> frozenset[str]:
    """What Linux says that an x86-64 CPU can do; nothing on any other."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    return frozenset(_cpu_info().get("flags", "").split())


def cpu_vendor() -> str:
    """The CPU's vendor by Linux' name, or else its architecture."""
    return _cpu_info().get("vendor_id") or platform.machine()


def cache_dir() -> Path:
    """The user's folder for what is made once and kept; it may not exist yet.

    Raises:
        BuildError: There is no home directory, and ``QUIRE_CACHE_DIR`` names no other.
    """
    chosen = os.environ.get("QUIRE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "quire"
    except RuntimeError as error:
        raise BuildError("no home directory to keep the build in; set QUIRE_CACHE_DIR") from error


@functools.cache
def _cpu_info() -> dict[str, str]:
    """The first CPU's lines of ``/proc/cpuinfo``; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    first = itertools.takewhile(str.strip, lines)
    return {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in first)}


def _digest_of_inputs(flags: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((platform.machine(), flags)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _sanitizer_flags() -> list[str]:
    checks = os.environ.get("QUIRE_NATIVE_SANITIZE")
    if not checks:
        return []
    what = [f"-fsanitize={checks}", "-fno-sanitize-recover=all"]
    return [*what, "-O1", "-g", "-fno-omit-frame-pointer"]


def _build_into(target: Path, compiler: list[str], flags: Sequence[str], files: list[Path]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        units = [file for file in files if file.suffix == ".cpp"]
        library = _compile(compiler, flags, units, Path(scratch))
        library.chmod(0o755)  # Whatever the umask.
        os.replace(library, target)


def _private(folder: Path) -> Path:
    """``folder``, made if it is not there and closed to other users' writing if it is ours; one of
    this process alone where it is somebody else's to write."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & _OTHERS_WRITE and found.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
        found = folder.stat()
    if _is_ours(found):
        return folder
    own = _folder_of_this_process()
    logger.warning(
        "%s may be written by other users: libraries are compiled into %s, for this process alone; "
        "set QUIRE_CACHE_DIR to a folder of yours",
        folder,
        own,
    )
    return own


def _is_trusted(library: Path) -> bool:
    """Whether it is there, and nobody else can have written it."""
    try:
        found = library.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and _is_ours(found)


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE


@functools.cache
def _folder_of_this_process() -> Path:
    folder = tempfile.mkdtemp(prefix="quire-native-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _compile(compiler: list[str], flags: Sequence[str], units: list[Path], scratch: Path) -> Path:
    """Each unit in a process of its own, then the link."""
    objects = [scratch / f"{unit.stem}.o" for unit in units]
    commands = [
        [*compiler, *flags, "-c", str(unit), "-o", str(out)]
        for unit, out in zip(units, objects, strict=True)
    ]
    out = scratch / "library.so"
    _run_all(commands)
    _run_all([[*compiler, *flags, "-shared", *map(str, objects), "-o", str(out)]])
    return out


def _run_all(commands: Sequence[list[str]]) -> None:
    """Runs as many commands at once as there are cores. None of their processes is left, whatever
    ends this.

    Raises:
        BuildError: A command failed.
    """
    waiting, running = list(reversed(commands)), dict[IO[str], subprocess.Popen[str]]()
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                process = _started(waiting.pop())
                assert process.stderr is not None
                running[process.stderr] = process
            # A compiler closes its output at its end, and has little to say before.
            for ended in select.select(list(running), [], [])[0]:
                process = running[ended]
                output = process.communicate()[1]
                del running[ended]
                if process.returncode:
                    lines = output.splitlines()
                    first = next((line for line in lines if "error" in line), output[:300])
                    assert isinstance(process.args, list)
                    command = shlex.join(map(str, process.args))
                    raise BuildError(f"{command} failed: {first.strip()}")
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _started(command: list[str]) -> subprocess.Popen[str]:
    """A process in a group of its own: the compiler's driver would leave its children behind."""
    # A sanitizer's runtime is for what is compiled; the compiler would take it up too.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        process_group=0,
    )
