"""SHA-256 over whole weight files, computed once on a node and cached.

Digests of a checkpoint's files are stored next to them in `DIGESTS_NAME` if the folder is writable,
else in the user's cache folder. A file is hashed again if its size, its inode or one of its times
has changed, or if the stored digests are unreadable or fail their own checksum. Anyone who can
write to the checkpoint can write its digests too.

Processes that start together wait for the first one to hash. Files are read through the page cache,
from which the weights are loaded afterwards.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire import native_build
from quire.worker.request.errors import CheckpointError

_log = logging.getLogger(__name__)

DIGESTS_NAME = ".quire-digests.json"

_CHUNK_BYTES = 16 << 20
"""Bytes hashed by one thread; the digest depends on it. SHA-256 runs at 1.6 GB/s on a Zen 4 core
and BLAKE2b at 0.9, so a file is hashed by several threads."""
_READ_BYTES = 1 << 20
"""Bytes per read, so few that they are hashed from the core's own cache."""
_Stamp = list[int]


def weight_digests(folder: Path, files: tuple[Path, ...]) -> dict[Path, str]:
    """The digest of each of ``files``, which belong to the checkpoint ``folder``, in hex.

    Raises:
        CheckpointError: A file cannot be read, or changed while it was hashed.
    """
    try:
        stamps = {file: _stamp(file) for file in files}
        found = _find(folder, stamps)
        if len(found) < len(files):
            with _alone(folder):
                found = _find(folder, stamps)  # Another process may have hashed them.
                if len(found) < len(files):
                    missing = [file for file in files if file not in found]
                    found |= _hash_files(missing, stamps)
                    _keep(folder, stamps, found)
        return {file: found[file] for file in files}
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error


def _hash_files(files: list[Path], stamps: Mapping[Path, _Stamp]) -> dict[Path, str]:
    chunks = [
        (file, offset) for file in files for offset in range(0, stamps[file][0], _CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "quire-digest") as pool:
        leaves = pool.map(_hash_chunk, *zip(*chunks, strict=True)) if chunks else iter(())
        trees = {file: hashlib.sha256(b"%d" % stamps[file][0]) for file in files}
        for (file, _), leaf in zip(chunks, leaves, strict=True):
            trees[file].update(leaf)
    for file in files:
        if _stamp(file) != stamps[file]:
            raise CheckpointError(f"{file}: changed while it was read; start again")
    return {file: tree.hexdigest() for file, tree in trees.items()}


def _hash_chunk(file: Path, offset: int) -> bytes:
    state = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        left = _CHUNK_BYTES
        while left and (size := stream.readinto(buffer[: min(left, _READ_BYTES)])):
            state.update(buffer[:size])
            left -= size
    return state.digest()


def _stamp(file: Path) -> _Stamp:
    """A stamp that changes whenever the file does. It includes ctime, which cannot be set, so a
    copy over the file that preserves mtime is noticed too."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _find(folder: Path, stamps: Mapping[Path, _Stamp]) -> dict[Path, str]:
    """The stored digests of files that have not changed."""
    found: dict[Path, str] = {}
    for kept in _places(folder):
        entries = _read(kept)
        for file, stamp in stamps.items():
            entry = entries.get(file.name)
            if isinstance(entry, dict) and entry.get("stamp") == stamp:
                found[file] = str(entry["sha256"])
    return found


def _read(kept: Path) -> dict[str, object]:
    """The entries of ``kept`` by file name; none if it is missing or damaged."""
    try:
        content = json.loads(kept.read_bytes())
        entries = content["files"]
        if content["check"] == _check(entries):
            return dict(entries)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}


def _keep(folder: Path, stamps: Mapping[Path, _Stamp], digests: Mapping[Path, str]) -> None:
    """Stores digests; keeps those of the folder's other files, which belong to other models."""
    new = {file.name: {"stamp": stamps[file], "sha256": digest} for file, digest in digests.items()}
    for kept in _places(folder):
        others = {
            name: entry for name, entry in _read(kept).items() if _is_of(folder / name, entry)
        }
        entries = others | new
        content = json.dumps({"files": entries, "check": _check(entries)}, indent=1)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            _write(kept, content)
        except OSError as error:
            _log.debug("digests cannot be kept in %s: %s", kept, error)
        else:
            return
    _log.warning("the digests of %s cannot be kept: each start hashes its weights again", folder)


def _is_of(file: Path, entry: object) -> bool:
    """Whether ``entry`` is of the file in its current state."""
    try:
        return isinstance(entry, dict) and entry.get("stamp") == _stamp(file)
    except (OSError, ValueError):
        return False


def _write(kept: Path, content: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix=kept.name, delete=False) as file:
        try:
            file.write(content)
            os.chmod(file.fileno(), 0o644)
            file.close()
            os.replace(file.name, kept)
        except BaseException:
            os.unlink(file.name)
            raise


def _check(entries: object) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _places(folder: Path) -> list[Path]:
    """Where digests may be stored, in order of preference."""
    places = [folder / DIGESTS_NAME]
    with contextlib.suppress(native_build.BuildError):  # There is no home directory.
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        places.append(native_build.cache_dir() / "digests" / f"{name}.json")
    return places


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process hashes this checkpoint, if the file system supports locks."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
