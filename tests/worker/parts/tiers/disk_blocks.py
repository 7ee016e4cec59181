"""Small blocks of random content, and a `DiskStore` for them."""

from pathlib import Path
from typing import Any

import numpy as np

from quire.worker.blocks.hashing import BlockHash
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.disk import DiskStore, Put

FORMAT = KvFormat(num_layers=2, num_kv_heads=2, head_bytes=32, block_size=4)
FILE_BYTES = 4096
"""Size of one block's file as the store counts it: a page."""


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, FORMAT.block_bytes, np.uint8)


def store_in(folder: Path, *, num_blocks: int = 100, **options: Any) -> DiskStore:
    given: dict[str, Any] = {
        "identity": "model",
        "format": FORMAT,
        "max_bytes": num_blocks * FILE_BYTES,
    }
    return DiskStore(folder, **(given | options))


def put(store: DiskStore, number: int, parent: int | None = None) -> Put:
    bytes_C = content(number)
    above = None if parent is None else name(parent)
    return store.put(name(number), above, bytes_C, checksum_of(bytes_C))


def put_chain(store: DiskStore, *numbers: int) -> None:
    for parent, number in zip((None, *numbers), numbers, strict=False):
        assert not put(store, number, parent).error


def read(store: DiskStore, number: int) -> None:
    """Reads a block and asserts that content and checksum are right."""
    into_C = np.zeros(FORMAT.block_bytes, np.uint8)
    checksum = store.read(name(number), into_C)
    assert (into_C == content(number)).all()
    assert checksum == checksum_of(into_C)


def files(folder: Path) -> dict[int, Path]:
    """Files of all blocks in a folder, by the blocks' numbers."""
    return {int(path.name[:64], 16): path for path in folder.glob("*/*/??/*-*")}


def numbers(names: Any) -> list[int]:
    return [int.from_bytes(each, "big") for each in names]
