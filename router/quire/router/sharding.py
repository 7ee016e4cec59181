"""Which of several directory processes keeps a chain, where one process is not enough.

A chain is kept whole in one place, that of its first block: a look-up then asks one shard, and no
shard needs another's blocks to know that a chain has no holes.
"""

from quire.worker.hashing import BlockHash


def shard_of(first_block: BlockHash, *, num_shards: int) -> int:
    """The shard of all chains that begin with ``first_block``, from 0 to ``num_shards - 1``.

    Jump consistent hashing (Lamping and Veach, 2014): with one shard more, only the chains move
    that the new one gets, a share of ``1 / num_shards``.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: must be at least 1")
    key = int.from_bytes(first_block[:8], "little")
    shard, next_shard = 0, 0
    while next_shard < num_shards:
        shard = next_shard
        key = (key * 2862933555777941757 + 1) % 2**64
        next_shard = int((shard + 1) * (2**31 / ((key >> 33) + 1)))
    return shard
