import hashlib
from collections import Counter

import pytest

from quire.router.sharding import shard_of
from quire.worker.hashing import BlockHash

FIRST_BLOCKS = [BlockHash(hashlib.sha256(b"%d" % number).digest()) for number in range(4000)]


def test_shards_get_equal_shares() -> None:
    counts = Counter(shard_of(block, num_shards=8) for block in FIRST_BLOCKS)
    assert counts.keys() == set(range(8))
    assert max(counts.values()) < 1.25 * 500


def test_one_shard_more_moves_only_what_it_gets() -> None:
    for num_shards in range(1, 12):
        moved = 0
        for block in FIRST_BLOCKS:
            before = shard_of(block, num_shards=num_shards)
            after = shard_of(block, num_shards=num_shards + 1)
            assert after in (before, num_shards)
            moved += after != before
        assert moved == pytest.approx(4000 / (num_shards + 1), rel=0.25)


def test_no_shard_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards=0: must be at least 1"):
        shard_of(FIRST_BLOCKS[0], num_shards=0)
