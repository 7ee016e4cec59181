"""The names of cached blocks: a chain of SHA-256 hashes over everything that shapes their KV.

``h_i = SHA256(h_{i-1} + tokens_i)``, begun from a root that covers the model, the KV dtype, the
block size, the adapter and the tenant's salt. Two blocks of one name hold the same KV, and no one
can look for a collision that would be served another tenant's cache. Engine, gateway and
directory all use these functions, so that a name means the same everywhere.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the name of a full block and, through the chain, of all that precedes it."""

TokenIds = npt.NDArray[np.uint32]


def root_hash(
    *,
    model_fingerprint: str,
    kv_dtype: str,
    block_size: int,
    adapter: str = "",
    cache_salt: str = "",
) -> BlockHash:
    """The hash from which every chain of one model, tenant and adapter begins.

    The fields are encoded with their names, so that no salt can equal an adapter's name.
    """
    fields = {
        "adapter": adapter,
        "block_size": block_size,
        "cache_salt": cache_salt,
        "kv_dtype": kv_dtype,
        "model": model_fingerprint,
    }
    return BlockHash(hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest())


def hash_blocks(
    token_ids: TokenIds, *, block_size: int, parent: BlockHash, first_block: int = 0
) -> list[BlockHash]:
    """Hashes the full blocks of ``token_ids`` from block ``first_block`` on.

    ``parent`` is the hash of the block before ``first_block`` (the root, for block 0). A partial
    last block has no hash.
    """
    begin = first_block * block_size
    data = np.ascontiguousarray(token_ids[begin:], dtype="<u4").tobytes()
    num_bytes = 4 * block_size
    hashes: list[BlockHash] = []
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        # One call on joined bytes takes three quarters of the time of two updates.
        parent = BlockHash(hashlib.sha256(parent + data[start : start + num_bytes]).digest())
        hashes.append(parent)
    return hashes


def as_token_ids(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """``token_ids`` as one contiguous array of uint32, the form in which they are hashed."""
    return np.ascontiguousarray(token_ids, dtype=np.uint32)
