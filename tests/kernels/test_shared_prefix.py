"""Groups of rows that share prefix splits, against a search over every pair of rows."""

import numpy as np
import pytest

from quire.kernels.shared_prefix import find_shared, most_saved, most_saved_by_split
from quire.kernels.triton.launch import SPLIT_TOKENS

BLOCK_SIZE = 64
PER_SPLIT = SPLIT_TOKENS // BLOCK_SIZE


def tree(seed: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables that branch like a tree of prompts, each with its own tail."""
    rng = np.random.default_rng(seed)
    tables = np.zeros((num_rows, 8 * PER_SPLIT), np.int32)
    for row in range(num_rows):
        if row and rng.random() < 0.8:
            parent, common = rng.integers(row), rng.integers(8 * PER_SPLIT)
            tables[row, :common] = tables[parent, :common]
        own = tables[row] == 0
        tables[row, own] = 1 + row * 8 * PER_SPLIT + np.flatnonzero(own)
    return tables, rng.integers(1, 8 * SPLIT_TOKENS + 1, num_rows).astype(np.int32)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_each_shared_split_of_each_row_is_in_one_program_with_rows_that_share_it(
    seed: int, group: int
) -> None:
    tables, lens = tree(seed, 20)
    found = find_shared(tables, lens, block_size=BLOCK_SIZE, group=group, min_saved_tokens=1)
    assert found is not None
    expected = [0] * 20
    for row in range(20):
        for other in set(range(20)) - {row}:
            full = min(lens[row], lens[other]) // SPLIT_TOKENS * PER_SPLIT
            same = tables[row, :full] == tables[other, :full]
            common = int(same.argmin()) if not same.all() else full
            expected[row] = max(expected[row], common // PER_SPLIT)
    assert found.num_splits_B.tolist() == expected
    seen = []
    for rows, split in zip(found.rows_XR.tolist(), found.splits_X.tolist(), strict=True):
        members = [row for row in rows if row >= 0]
        assert rows[: len(members)] == members, "the first place is never empty"
        assert len(rows) == 16 // group
        upto = (split + 1) * PER_SPLIT
        assert all((tables[row, :upto] == tables[members[0], :upto]).all() for row in members)
        seen += [(row, split) for row in members]
    assert sorted(seen) == [(row, split) for row in range(20) for split in range(expected[row])]


def test_little_sharing_is_left_alone() -> None:
    tables = np.tile(np.arange(1, 8 * PER_SPLIT + 1, dtype=np.int32), (3, 1))
    lens = np.full(3, 8 * SPLIT_TOKENS, np.int32)

    def found(group: int, least: int) -> bool:
        arguments = {"block_size": BLOCK_SIZE, "group": group, "min_saved_tokens": least}
        return find_shared(tables, lens, **arguments) is not None

    assert found(4, 2 * 8 * SPLIT_TOKENS)
    assert not found(4, 2 * 8 * SPLIT_TOKENS + 1)
    assert not found(4, 1 << 18)
    assert not found(16, 1), "a program has no room for two rows"
    for rows in (1, 0):
        few = tables[:rows], lens[:rows]
        assert find_shared(*few, block_size=BLOCK_SIZE, group=4, min_saved_tokens=1) is None
    tables[:] = np.arange(tables.size).reshape(tables.shape)
    assert not found(4, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_never_below_what_sharing_saves(seed: int) -> None:
    tables, lens = tree(seed, 20)
    found = find_shared(tables, lens, block_size=BLOCK_SIZE, group=4, min_saved_tokens=1)
    assert found is not None
    reads = {
        (int(tables[rows[0], (split + 1) * PER_SPLIT - 1]), split)
        for rows, split in zip(found.rows_XR.tolist(), found.splits_X.tolist(), strict=True)
    }
    saved = (int(found.num_splits_B.sum()) - len(reads)) * SPLIT_TOKENS
    closer = most_saved_by_split(tables, lens, block_size=BLOCK_SIZE)
    assert 0 < saved <= closer <= most_saved(tables, lens, block_size=BLOCK_SIZE)


def test_rows_that_share_too_little_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import shared_prefix

    def searched(*_: object) -> None:
        raise AssertionError("the search ran")

    monkeypatch.setattr(shared_prefix, "_groups", searched)
    tables, lens = tree(1, 64)
    bound = most_saved_by_split(tables, lens, block_size=BLOCK_SIZE)
    options = {"block_size": BLOCK_SIZE, "group": 4}
    assert find_shared(tables, lens, **options, min_saved_tokens=bound + 1) is None
    with pytest.raises(AssertionError, match="the search ran"):
        find_shared(tables, lens, **options, min_saved_tokens=bound)
