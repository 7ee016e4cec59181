"""The checksum of blocks outside the KV cache."""

from quire.worker.blocks.kv_format import Bytes


def checksum_of(block_C: Bytes) -> bytes:
    """XXH3 of a block's bytes, 128 bits."""
    import xxhash  # Not needed by engines whose blocks stay in the KV cache.

    digest: bytes = xxhash.xxh3_128_digest(block_C.data)
    return digest
