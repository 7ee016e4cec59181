"""Injects faults into blocks in files, and into the disk."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bench.kv.groups import transfers_of

from quire.cluster.group.server import GroupServer
from quire.worker.blocks.hashing import BlockHash
from quire.worker.parts.tiers import disk, disk_file
from quire.worker.parts.tiers.disk_file import HEADER_BYTES

Harm = Callable[[Path, Path, np.random.Generator], None]
"""Damages the first file; the second file is another block's."""


def store_of(group: GroupServer) -> disk.DiskStore:
    store = transfers_of(group)._disk
    assert store is not None, "it keeps nothing on disk"
    return store


def file_of(group: GroupServer, name: BlockHash) -> Path:
    store = store_of(group)
    return store._path(name, store._index.parent(name))


def _flip(path: Path, other: Path, rng: np.random.Generator) -> None:
    begin, end = (0, HEADER_BYTES) if rng.random() < 0.5 else (HEADER_BYTES, path.stat().st_size)
    with path.open("r+b") as file:
        place = int(rng.integers(begin, end))
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << int(rng.integers(8))]))


def _truncate(path: Path, other: Path, rng: np.random.Generator) -> None:
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def _swap(path: Path, other: Path, rng: np.random.Generator) -> None:
    """Swaps the names of the two blocks' files."""
    between = path.with_name("between")
    path.rename(between)
    other.rename(path)
    between.rename(other)


def _stale(path: Path, other: Path, rng: np.random.Generator) -> None:
    """As another version of Quire would have written it."""
    with path.open("r+b") as file:
        file.seek(8)
        file.write((0).to_bytes(4, "little"))


def _remove(path: Path, other: Path, rng: np.random.Generator) -> None:
    path.unlink()


FILE_FAULTS: dict[str, Harm] = {
    "byte flipped in a file": _flip,
    "file truncated": _truncate,
    "files swapped": _swap,
    "stale file": _stale,
    "file removed": _remove,
}


@dataclass
class Touched:
    """What a store used of its disk. A fault elsewhere has met nobody: for example, a damaged file
    that was deleted to make room before a request read it."""

    read: set[BlockHash] = field(default_factory=set)
    num_writes: int = 0


@contextlib.contextmanager
def noted(store: disk.DiskStore) -> Iterator[Touched]:
    """Notes which blocks are read, and counts writes, also those that fail."""
    touched, write = Touched(), store._write
    read: Callable[..., bytes] = vars(disk)["read_file"]  # Which may be that of another fault.

    def note_read(*args: Any, block: BlockHash, **options: Any) -> bytes:
        touched.read.add(block)
        return read(*args, block=block, **options)

    def note_write(*args: Any) -> None:
        touched.num_writes += 1
        write(*args)

    with (
        mock.patch.object(disk, "read_file", note_read),
        mock.patch.object(store, "_write", note_write),
    ):
        yield touched


@contextlib.contextmanager
def failing_reads() -> Iterator[None]:
    def refuse(*args: Any, **options: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch.object(disk, "read_file", refuse):
        yield


@contextlib.contextmanager
def slow_reads(*, read_s: float) -> Iterator[None]:
    read = disk_file.read_file

    def wait(*args: Any, **options: Any) -> bytes:
        time.sleep(read_s)
        return read(*args, **options)

    with mock.patch.object(disk, "read_file", wait):
        yield


@contextlib.contextmanager
def full_disk(store: disk.DiskStore) -> Iterator[None]:
    """Writes fail; behind it, the store tries again at once."""

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(disk, "write_file", refuse):
        yield
    store._paused_until_s = 0.0


def remove_folder(folder: Path) -> None:
    """Removes the folder and its contents while an engine uses it."""
    shutil.rmtree(folder, ignore_errors=True)
