"""Attention that reads a shared prefix once for several rows equals that of each row alone.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from tools.kernels.testing import assert_near_twin, paged_batch, shared_splits

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.launch import SPLIT_TOKENS

TRITON = TritonBackend()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "dtype", "options"),
    [
        (6, 2, 32, torch.float32, PLAIN),
        (8, 2, 64, torch.float16, AttentionOptions(soft_cap=2.0)),
        (8, 1, 80, torch.float32, PLAIN),
        (2, 2, 16, torch.float16, PLAIN),
    ],
)
def test_sharing_changes_no_bit(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    options: AttentionOptions,
) -> None:
    long, short = 2 * SPLIT_TOKENS + 9, SPLIT_TOKENS + 1
    batch = paged_batch(
        [(long, 1), (7, 1), (long, 1), (short, 1), (2 * SPLIT_TOKENS, 1), (20, 20)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=16,
        dtype=dtype,
    )
    per_split = SPLIT_TOKENS // 16
    # Rows 0, 2 and 4 share two splits; row 3 shares the first of them.
    for other, num_splits in ((2, 2), (3, 1), (4, 2)):
        batch = batch.with_shared_prefix(0, other, num_splits * per_split)
    shared = shared_splits(batch, num_decodes=5)
    assert shared is not None
    assert shared.num_splits_B.tolist() == [2, 0, 2, 1, 2]
    apart = batch.attend(TRITON, num_decodes=5, options=options)
    together = batch.attend(TRITON, num_decodes=5, options=options, shared=shared)
    assert torch.equal(together, apart)
    assert_near_twin(together, batch.expected(options=options))


def test_a_split_that_is_shared_is_read_from_the_first_rows_blocks_alone() -> None:
    batch = paged_batch(
        [(SPLIT_TOKENS + 5, 1), (SPLIT_TOKENS + 5, 1)],
        num_heads=4,
        num_kv_heads=1,
        head_size=16,
        block_size=16,
    ).with_shared_prefix(0, 1, SPLIT_TOKENS // 16)
    shared = shared_splits(batch, num_decodes=2)
    want = batch.attend(TRITON, num_decodes=2)
    batch.block_tables[1, : SPLIT_TOKENS // 16] = 0  # NaN
    assert torch.equal(batch.attend(TRITON, num_decodes=2, shared=shared), want)


def test_sharing_a_float8_cache_changes_no_bit() -> None:
    batch = paged_batch(
        [(SPLIT_TOKENS + 5, 1), (SPLIT_TOKENS + 70, 1)],
        num_heads=4,
        num_kv_heads=1,
        head_size=32,
        block_size=16,
        dtype=torch.float16,
    ).with_shared_prefix(0, 1, SPLIT_TOKENS // 16)
    k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in (batch.k_cache, batch.v_cache))
    rounded = replace(batch, k_cache=k_cache, v_cache=v_cache)
    shared = shared_splits(rounded, num_decodes=2)
    together = rounded.attend(TRITON, num_decodes=2, shared=shared)
    assert torch.equal(together, rounded.attend(TRITON, num_decodes=2))
    assert_near_twin(together, rounded.expected())
