"""Fixture ``blocks``, which derives block hashes from short names."""

import hashlib
from collections.abc import Callable, Iterable

import pytest

from quire.worker.blocks.hashing import BlockHash


@pytest.fixture(scope="session")
def blocks() -> Callable[[Iterable[object]], tuple[BlockHash, ...]]:
    """Maps names to block hashes, equal names to equal hashes."""

    def hashes(names: Iterable[object]) -> tuple[BlockHash, ...]:
        return tuple(BlockHash(hashlib.sha256(repr(name).encode()).digest()) for name in names)

    return hashes
