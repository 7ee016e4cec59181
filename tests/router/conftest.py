"""Short names for what the router's tests are about."""

import hashlib
import warnings
from collections.abc import Callable, Iterable

import pytest

from quire.worker.api.hashing import BlockHash

# Ray 2.60 declares its models in a way that pydantic calls deprecated, once, on import.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import ray.serve  # noqa: F401


@pytest.fixture(scope="session")
def blocks() -> Callable[[Iterable[object]], tuple[BlockHash, ...]]:
    """The hashes of blocks that are told apart by a name each."""

    def hashes(names: Iterable[object]) -> tuple[BlockHash, ...]:
        return tuple(BlockHash(hashlib.sha256(repr(name).encode()).digest()) for name in names)

    return hashes
