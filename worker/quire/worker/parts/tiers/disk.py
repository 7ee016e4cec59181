"""A store of blocks on a local disk, by name. Its size is bounded, and it survives restarts.

    <kv_disk_dir>/<slot>/lock
    <kv_disk_dir>/<slot>/<identity>/<xx>/<block>-<parent>     one file a block, hexadecimal
    <kv_disk_dir>/<slot>/<identity>/unfinished/               deleted at the start

Engines may share the folder: each takes the first slot that no other has locked, with the files
that an earlier engine left there. Files of another identity (another model, another format) count
toward the bound, and are deleted first. A file appears whole or not at all, as it is renamed into
its place; damage after a crash of the machine is detected when the file is read (`disk_file`).

The index is in memory. Calls that only use the index (`__contains__`, `match`) never wait for the
disk. `put` and `read` do, so they must not be called from an engine's thread.
"""

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.worker.blocks.hashing import HASH_BYTES, BlockHash
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.parts.tiers.disk_file import HEADER_BYTES, BadFile, read_file, write_file
from quire.worker.parts.tiers.disk_index import DiskIndex, Named
from quire.worker.request.errors import ConfigError

_log = logging.getLogger(__name__)

# C bytes of a block

MAX_SLOTS = 1024
"""Most engines that can share a folder."""
RETRY_S = 30.0
"""After a failed write, no write is tried for this long."""
TOUCH_S = 60.0
"""A block's last use is written to disk at most this often."""

_PAGE_BYTES = 4096
_UNFINISHED = "unfinished"
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE}
"""Errors of a read after which a block counts as lost; others may pass."""


class DiskReadError(Exception):
    """A block cannot be read from disk. The message names its file and the reason."""

    def __init__(self, path: Path, what: str, removed: Sequence[BlockHash] = ()) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
        self.what = what
        self.removed = tuple(removed)
        """Blocks that are no longer on disk: this one and its descendants."""


class BlockCorrupt(DiskReadError):
    """A block's bytes differ from what was written. The block was deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """The result of writing a block."""

    error: str = ""
    """Why the block is not on disk; empty if it is."""
    removed: tuple[BlockHash, ...] = ()
    """Blocks that were deleted to make room, whether or not the block was written."""


class DiskStore:
    """The blocks of one engine on its disk. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: str,
        format: KvFormat,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes a slot and lists its files. ``identity`` covers everything besides the format that
        determines the contents of a block with a given name.

        Raises:
            ConfigError: The folder cannot be used.
        """
        self.format = format
        self._max_bytes = max_bytes
        self._clock = clock
        self._file_bytes = _on_disk(HEADER_BYTES + format.block_bytes)
        self._lock = threading.Lock()
        self._index = DiskIndex()
        self._num_bytes = 0
        self._busy: set[BlockHash] = set()
        """Blocks that are being written or deleted."""
        self._paused_until_s = 0.0
        self._pause = ""
        self._numbers = itertools.count()
        digest = hashlib.sha256(f"{identity} {format}".encode()).hexdigest()[:32]
        self._slot_lock = -1
        try:
            self._slot, self._slot_lock = _take_slot(folder)
            self._folder = self._slot / digest
            shutil.rmtree(self._folder / _UNFINISHED, ignore_errors=True)
            (self._folder / _UNFINISHED).mkdir(parents=True)
            self._foreign = _foreign_files(self._slot, own=digest)
            self._load()
        except OSError as error:
            self.close()
            raise _unusable(folder, error) from error
        self._num_bytes += sum(num_bytes for _, num_bytes in self._foreign)
        self._delete(*self._make_room(0))

    @property
    def num_bytes(self) -> int:
        """Size of all files in the slot, as the disk counts them."""
        return self._num_bytes

    @property
    def why_not(self) -> str:
        """Why blocks are currently not written; empty if they are."""
        return self._pause if self._clock() < self._paused_until_s else ""

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._index

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Length in blocks of the beginning of a chain that is on disk."""
        with self._lock:
            for number, block in enumerate(hashes):
                if block not in self._index:
                    return number
        return len(hashes)

    def blocks(self) -> list[Named]:
        """All blocks, each with its parent. Parents come before children."""
        with self._lock:
            return self._index.blocks()

    def put(
        self, block: BlockHash, parent: BlockHash | None, bytes_C: Bytes, checksum: bytes
    ) -> Put:
        """Writes a block, whose parent must be on disk. Does not raise: a failed write is logged,
        and no further write is tried for `RETRY_S`."""
        with self._lock:
            if block in self._index:
                self._index.use(block)
                return Put()
            refusal = self._refusal(block, parent)
            if refusal:
                return Put(error=refusal)
            pin = None if parent is None else self._index.pin(parent)
            self._busy.add(block)
            foreign, removed = self._make_room(self._file_bytes)
            has_room = self._num_bytes + self._file_bytes <= self._max_bytes
            if has_room:
                self._num_bytes += self._file_bytes
        error = "kv_disk_size has no room for one block more"
        try:
            self._delete(foreign, removed)
            if has_room:
                self._write(block, parent, bytes_C, checksum)
                error = ""
        except OSError as reason:
            error = self._stop_writing(reason)
        lost = False
        with self._lock:
            self._busy.discard(block)
            if parent is not None:
                self._index.unpin(parent, pin)
                lost = parent not in self._index
            if not error and not lost:
                self._index.add(block, parent)
            elif has_room:
                self._num_bytes -= self._file_bytes
        if lost and not error:
            error = "its parent turned out damaged"
            _delete([self._path(block, parent)])
        return Put(error=error, removed=tuple(name for name, _ in removed))

    def read(self, block: BlockHash, into_C: Bytes) -> bytes:
        """Reads a block's bytes into ``into_C``, checks them, and returns their checksum.

        Raises:
            BlockCorrupt: The bytes differ from what was written.
            DiskReadError: The block is not on disk, or the disk returned an error.
        """
        with self._lock:
            parent = self._index.parent(block) if block in self._index else None
            path = self._path(block, parent)
            if block not in self._index:
                raise DiskReadError(path, "is not there any more")
            self._index.use(block)
            now_s = self._clock()
            touch = self._index.wants_touch(block, now_s=now_s, every_s=TOUCH_S)
        try:
            checksum = read_file(path, into_C, format=self.format, block=block, parent=parent)
        except BadFile as error:
            raise BlockCorrupt(path, str(error), self._forget(block)) from error
        except OSError as error:
            removed = self._forget(block) if error.errno in _GONE else []
            raise DiskReadError(path, f"cannot be read: {error.strerror}", removed) from error
        if touch:
            with suppress(OSError):  # A disk that cannot be written to can still be read.
                os.utime(path)
        return checksum

    def discard(self, block: BlockHash) -> list[BlockHash]:
        """Deletes a block and its descendants, and returns those deleted. Waits for the disk."""
        return self._forget(block)

    def close(self) -> None:
        """Unlocks the slot for other engines. Nothing may be written afterwards."""
        with self._lock:
            self._pause, self._paused_until_s = "the store is closed", float("inf")
            lock, self._slot_lock = self._slot_lock, -1
        if lock >= 0:
            os.close(lock)

    def _load(self) -> None:
        """Fills the index from the names of files, least recently used first."""
        found: dict[BlockHash, tuple[int, BlockHash | None]] = {}
        bad: list[Path] = []
        for path, status in _files(self._folder):
            named = _parse(path.name)
            size = HEADER_BYTES + self.format.block_bytes
            if named is None or named[0] in found or status.st_size != size:
                bad.append(path)
            else:
                found[named[0]] = (status.st_mtime_ns, named[1])
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for block, (_, parent) in found.items():
            children.setdefault(parent, []).append(block)
        left = list(children.get(None, ()))
        while left:
            block = left.pop()
            self._index.add(block, found[block][1])
            left += children.get(block, ())
        for block in sorted(found, key=lambda block: found[block][0]):
            if block in self._index:
                self._index.use(block)
            else:  # Useless without the blocks before it.
                bad.append(self._path(block, found[block][1]))
        self._num_bytes = len(self._index) * self._file_bytes
        _delete(bad)

    def _refusal(self, block: BlockHash, parent: BlockHash | None) -> str:
        if self.why_not:
            return self.why_not
        if block in self._busy:
            return "it is being written or deleted"
        if parent is not None and parent not in self._index:
            return "its parent is not on disk"
        return ""

    def _make_room(self, num_bytes: int) -> tuple[list[Path], list[Named]]:
        """Chooses files to delete, foreign files first and then blocks, until there is room or none
        may be deleted. They count no longer. `_delete` must follow, without the lock."""
        foreign: list[Path] = []
        removed: list[Named] = []
        while self._num_bytes + num_bytes > self._max_bytes:
            if self._foreign:
                path, freed = self._foreign.pop()
                foreign.append(path)
                self._num_bytes -= freed
                continue
            named = self._index.pop_least_used()
            if named is None:
                break
            removed.append(named)
            self._num_bytes -= self._file_bytes
        self._busy.update(name for name, _ in removed)
        return foreign, removed

    def _delete(self, foreign: Iterable[Path], removed: Sequence[Named]) -> None:
        _delete([*foreign, *(self._path(*named) for named in removed)])
        with self._lock:
            self._busy.difference_update(name for name, _ in removed)

    def _write(
        self, block: BlockHash, parent: BlockHash | None, bytes_C: Bytes, checksum: bytes
    ) -> None:
        with open(self._slot / "lock", "rb") as file:
            if not os.path.samestat(os.fstat(file.fileno()), os.fstat(self._slot_lock)):
                raise FileNotFoundError(errno.ENOENT, "another engine has made a new folder")
        unfinished = self._folder / _UNFINISHED / str(next(self._numbers))
        path = self._path(block, parent)
        unfinished.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_file(
                unfinished,
                bytes_C,
                format=self.format,
                block=block,
                parent=parent,
                checksum=checksum,
            )
            try:
                unfinished.rename(path)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                unfinished.rename(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def _stop_writing(self, reason: OSError) -> str:
        error = f"{self._folder}: {reason.strerror or reason}"
        with self._lock:
            is_new = not self.why_not
            if self._paused_until_s != float("inf"):
                self._pause, self._paused_until_s = error, self._clock() + RETRY_S
        if is_new:
            _log.warning("%s; no blocks are written to disk for %g s", error, RETRY_S)
        return error

    def _forget(self, block: BlockHash) -> list[BlockHash]:
        """Deletes a block and its descendants, and returns those deleted."""
        with self._lock:
            gone = self._index.remove_with_descendants(block)
            self._num_bytes -= len(gone) * self._file_bytes
            self._busy.update(name for name, _ in gone)
        self._delete((), gone)
        return [name for name, _ in gone]

    def _path(self, block: BlockHash, parent: BlockHash | None) -> Path:
        name = block.hex()
        return self._folder / name[:2] / f"{name}-{'root' if parent is None else parent.hex()}"


def check_folder(folder: Path) -> None:
    """Makes ``folder`` if it is missing. Raises ConfigError: no store can be kept in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"kv_disk_dir={str(folder)!r}: {error}; name a folder that can be written to, or leave it "
        "out"
    )


def _take_slot(folder: Path) -> tuple[Path, int]:
    """Locks the first free slot. Raises OSError, also if all slots are taken."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(MAX_SLOTS):
        slot = folder / str(number)
        slot.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(slot / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except BaseException:
            os.close(lock)
            raise
        else:
            return slot, lock
    raise OSError(f"{MAX_SLOTS} engines use it already")


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All files two levels below ``folder``. Opens none of them."""
    for fan in os.scandir(folder):
        if fan.is_dir(follow_symlinks=False) and fan.name != _UNFINISHED:
            for file in os.scandir(fan):
                yield Path(file.path), file.stat(follow_symlinks=False)


def _foreign_files(slot: Path, *, own: str) -> list[tuple[Path, int]]:
    """Files of other identities with their sizes, the most recently used first."""
    found: list[tuple[Path, os.stat_result]] = []
    for folder in os.scandir(slot):
        if folder.is_dir(follow_symlinks=False) and folder.name != own:
            shutil.rmtree(Path(folder) / _UNFINISHED, ignore_errors=True)
            found += _files(Path(folder))
    found.sort(key=lambda each: each[1].st_mtime_ns, reverse=True)
    return [(path, _on_disk(status.st_size)) for path, status in found]


def _parse(name: str) -> Named | None:
    block, _, parent = name.partition("-")
    try:
        names = [bytes.fromhex(each) for each in (block, parent) if each != "root"]
    except ValueError:
        return None
    if not names or any(len(each) != HASH_BYTES for each in names) or block == "root":
        return None
    return BlockHash(names[0]), BlockHash(names[1]) if len(names) == 2 else None


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # The file no longer counts; the next start counts it again.
            path.unlink()


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
