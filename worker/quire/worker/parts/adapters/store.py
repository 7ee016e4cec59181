"""Stores adapters on this node's disk, by the digest of their content.

    <root>/<digest>/adapter_config.json
    <root>/<digest>/adapter_model.safetensors

The digest is a SHA-256 over the names and contents of both files. So an entry never changes, even
if the folder that it was copied from does. An entry appears atomically.

The store is bounded: beyond ``max_bytes`` the least recently used adapters are removed, except
those that a process on this node holds (by a shared lock on the folder). Files that interrupted
processes left behind are removed after an hour.

Does not import torch.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from quire import native_build
from quire.worker.parts.adapters.peft import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    WEIGHTS_NAME,
    check_files,
    read_config,
)
from quire.worker.request.errors import AdapterError, CheckpointError
from quire.worker.weights.checkpoint import open_file

FILE_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
MAX_BYTES = 16 << 30
"""The limit for a node: 1,600 adapters of rank 16 on all linear modules of a 3B model."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = "unfinished-"
_OLD_S = 3600.0
_PIECE_BYTES = 1 << 20


class Held:
    """An adapter that stays in the store until `release`, which is idempotent."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock: int | None = lock

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    close = release

    def __del__(self) -> None:
        self.release()


class AdapterStore:
    """The adapters of a node. Several processes may open the same ``root``.

    ``root`` is set by ``QUIRE_ADAPTER_DIR``; the default is a folder in the user's cache folder.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        check: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """``check`` gets the folder of each adapter that is put here, before it is kept, and raises
        AdapterError to refuse it."""
        self._root = root
        self._max_bytes = max_bytes
        self._check = check

    @property
    def root(self) -> Path:
        if self._root is not None:
            return self._root
        chosen = os.environ.get("QUIRE_ADAPTER_DIR")
        try:
            self._root = Path(chosen) if chosen else native_build.cache_dir() / "adapters"
        except native_build.BuildError as error:
            raise AdapterError(
                "no home directory to keep adapters in; set QUIRE_ADAPTER_DIR"
            ) from error
        return self._root

    def put(self, folder: Path, *, expected: str | None = None) -> str:
        """Copies the adapter in ``folder``; returns its digest. After an error the store is as it
        was.

        Raises:
            AdapterError: A file is missing or cannot be stored, the adapter is of an unsupported
                kind or refused, or the digest is not ``expected``.
        """
        read_config(folder)
        check_files(folder)
        digest = digest_of(folder, max_bytes=self._max_bytes)
        if expected in (None, digest) and (held := self.hold(digest)) is not None:
            with contextlib.closing(held), _named_as_in(folder, held.folder):
                self._check(held.folder)
            return digest
        with self.receiving() as unfinished:
            for name in FILE_NAMES:
                _copy(folder / name, unfinished / name, max_bytes=self._max_bytes)
            with _named_as_in(folder, unfinished):
                self._check(unfinished)
            return self._keep(unfinished, expected=expected)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Path]:
        """An empty folder for the two files to pass to `keep`; removed when the context ends."""
        with _explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root))
        try:
            yield unfinished
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def keep(self, unfinished: Path, *, expected: str | None = None) -> str:
        """Moves the files in a folder of `receiving` into the store; returns their digest. After an
        error the store is as it was.

        Raises:
            AdapterError: As `put`.
        """
        with _named_as_in(Path(expected or "adapter"), unfinished):
            read_config(unfinished)
            self._check(unfinished)
        return self._keep(unfinished, expected=expected)

    def _keep(self, unfinished: Path, *, expected: str | None) -> str:
        digest = digest_of(unfinished)
        if expected is not None and digest != expected:
            raise AdapterError(f"the adapter's files have the digest {digest}, not {expected}")
        with _explained(unfinished):
            with contextlib.suppress(FileExistsError), _locked(unfinished, fcntl.LOCK_SH):
                # Another process may have been faster; then its copy stays.
                if self.folder(digest) is None:
                    _rename(unfinished, self.root / digest)
            self.prune(keep=digest)
        if self.folder(digest) is None:
            raise AdapterError(f"{self.root / digest}: was removed as it was put there; try again")
        return digest

    def folder(self, digest: str) -> Path | None:
        """The adapter's folder; ``None`` if it is not stored. Marks it as used now."""
        if _DIGEST.fullmatch(digest) is None:
            return None
        folder = self.root / digest
        try:
            os.utime(folder)
        except FileNotFoundError:
            return None
        except OSError:  # It belongs to another user but can be read.
            return folder if folder.is_dir() else None
        return folder

    def hold(self, digest: str) -> Held | None:
        """Holds the adapter, so that it is not removed; ``None`` if it is not stored."""
        folder = self.folder(digest)
        if folder is None:
            return None
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            is_there = os.stat(folder).st_ino == os.fstat(lock).st_ino
        except FileNotFoundError:
            is_there = False
        if not is_there:  # Removed between look-up and lock.
            os.close(lock)
            return None
        return Held(folder, lock)

    def prune(self, *, keep: str = "") -> None:
        """Removes the least recently used adapters beyond the bound, and stale unfinished ones."""
        now = time.time()
        found: list[tuple[float, Path, int]] = []
        for entry in os.scandir(self.root):
            with contextlib.suppress(OSError):
                used_s, path = entry.stat().st_mtime, Path(entry.path)
                if _DIGEST.fullmatch(entry.name):
                    found.append((used_s, path, _num_bytes(path)))
                elif entry.name.startswith(_UNFINISHED) and now - used_s > _OLD_S:
                    self._remove(path)
        num_bytes = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if num_bytes <= self._max_bytes:
                break
            if path.name != keep and self._remove(path):
                num_bytes -= size

    def _remove(self, folder: Path) -> bool:
        """Removes a folder unless a process holds it. It is renamed first, so that it disappears
        atomically."""
        with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            gone = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root))
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            return True
        return False


def digest_of(folder: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The digest of the two files in ``folder``, which identifies an adapter.

    Raises:
        AdapterError: A file cannot be read, or has more than ``max_bytes``.
    """
    state = hashlib.sha256()
    for name in FILE_NAMES:
        with _explained(folder / name), _opened(folder / name, max_bytes=max_bytes) as stream:
            size = os.fstat(stream.fileno()).st_size
            state.update(f"{name}\0{size}\0".encode())
            for piece in _pieces(stream, size):
                state.update(piece)
    return state.hexdigest()


def _copy(source: Path, target: Path, *, max_bytes: int) -> None:
    with (
        _explained(source),
        _opened(source, max_bytes=max_bytes) as stream,
        target.open("wb") as copy,
    ):
        for piece in _pieces(stream, os.fstat(stream.fileno()).st_size):
            copy.write(piece)


def _opened(file: Path, *, max_bytes: int) -> BinaryIO:
    return open_file(file, max_bytes=MAX_CONFIG_BYTES if file.name == CONFIG_NAME else max_bytes)


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The first ``size`` bytes: another process may be writing to the file without end."""
    while size > 0 and (piece := stream.read(min(size, _PIECE_BYTES))):
        size -= len(piece)
        yield piece


@contextlib.contextmanager
def _named_as_in(folder: Path, copy: Path) -> Iterator[None]:
    """Errors name the files of ``folder`` instead of those of its copy."""
    try:
        yield
    except AdapterError as error:
        raise AdapterError(str(error).replace(str(copy), str(folder))) from error


def _rename(source: Path, target: Path) -> None:
    """Renames a folder. Raises FileExistsError: the target exists."""
    try:
        source.rename(target)
    except OSError as error:
        if target.is_dir():
            raise FileExistsError(str(target)) from error
        raise


def _num_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in os.scandir(folder))


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, kind)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise AdapterError(f"{error.filename or path}: {error.strerror}") from error
