"""The checksum that blocks bear outside the KV cache."""

from quire.worker.api.kv_format import Bytes


def checksum_of(block_C: Bytes) -> bytes:
    """XXH3 of a block's bytes, 128 bits."""
    import xxhash  # Engines whose blocks stay in their cache do without.

    digest: bytes = xxhash.xxh3_128_digest(block_C.data)
    return digest
