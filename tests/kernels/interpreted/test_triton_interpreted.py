"""The Triton kernels against their twins in Triton's interpreter, on the CPU.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``: the mode is fixed when a kernel is
defined, so it needs a separate process. The interpreter's bfloat16 results are silently wrong, so
these tests use float32 and float16. A program takes about 5 ms.
"""

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from tools.kernels.testing import PagedBatch, assert_near_twin, paged_batch

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.triton import kv_write as triton_kv_write
from quire.kernels.triton import prefill as triton_prefill
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.decode import decode_attention
from quire.kernels.triton.launch import SPLIT_TOKENS, prefill_parts
from quire.kernels.triton.prefill import prefill_attention

TRITON = TritonBackend()
SENTINEL = 12345.0
SHAPES = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size", "dtype"),
    [
        (2, 2, 16, 4, torch.float32),
        (6, 2, 64, 16, torch.float16),
        (3, 1, 80, 8, torch.float32),
        (4, 1, 96, 32, torch.float16),
        (8, 2, 128, 64, torch.float32),
        (2, 1, 256, 128, torch.float16),
        (20, 1, 32, 16, torch.float32),
    ],
)


def decode(batch: PagedBatch, *, longest: int) -> Tensor:
    """Runs the decode kernel into a sentinel-filled output with a spare row at either end."""
    num_rows = len(batch.rows)
    out = torch.full((num_rows + 2, *batch.q.shape[1:]), SENTINEL, dtype=batch.q.dtype)
    tables = batch.tables()
    decode_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        out[1:-1],
        block_tables_BM=tables["block_tables_BM"],
        seq_lens_B=tables["seq_lens_B"],
        max_seq_len=longest,
        scale=batch.scale,
    )
    assert (out[0] == SENTINEL).all()
    assert (out[-1] == SENTINEL).all()
    return out[1:-1]


def prefill(batch: PagedBatch, *, first_row: int = 0, options: AttentionOptions = PLAIN) -> Tensor:
    out = torch.full_like(batch.q, SENTINEL)
    prefill_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        out,
        **batch.tables(),
        first_row=first_row,
        max_query_len=max(queries for _, queries in batch.rows),
        max_seq_len=max(tokens for tokens, _ in batch.rows),
        scale=batch.scale,
        options=options,
    )
    return out


@pytest.mark.quick_cells(2)
@SHAPES
def test_decode_is_its_twin_on_ragged_rows(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        [(1, 1), (SPLIT_TOKENS + 1, 1), (63, 1)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    assert_near_twin(decode(batch, longest=SPLIT_TOKENS + 1), batch.expected())


@pytest.mark.quick_cells(1)
@SHAPES
def test_prefill_is_its_twin_on_ragged_rows_with_cached_context(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        [(1, 1), (65, 65), (130, 7)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    assert_near_twin(prefill(batch), batch.expected())


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", ["one", "each"])
@pytest.mark.parametrize("cuts", [(1,), (31, 32, 33), (50,)])
def test_a_context_in_splits_gives_a_token_the_same_bits_in_any_chunk(
    cuts: tuple[int, ...], num_parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole prompt has one program for all splits, its chunks one for each, or vice versa."""
    batch = paged_batch(
        [(150, 70), (40, 40), (9, 1)], num_heads=4, num_kv_heads=2, head_size=80, block_size=8
    )
    ways: list[Callable[..., int]] = [lambda _, num_splits: 1, lambda _, num_splits: num_splits]
    whole_way, chunk_way = ways if num_parts == "one" else ways[::-1]
    monkeypatch.setattr(triton_prefill, "prefill_split", lambda **_: 64)
    monkeypatch.setattr(triton_prefill, "prefill_parts", whole_way)
    whole = prefill(batch)
    assert_near_twin(whole, batch.expected())
    monkeypatch.setattr(triton_prefill, "prefill_parts", chunk_way)
    for first, end in itertools.pairwise((0, *cuts, 70)):
        assert torch.equal(prefill(batch.cut(0, first, end)), whole[first:end])
    assert torch.equal(prefill(batch.only(1)), whole[70:110])


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True])
def test_a_lookahead_over_splits_is_that_of_the_twin(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = paged_batch(
        [(150, 150), (40, 40)], num_heads=4, num_kv_heads=2, head_size=32, block_size=8
    )
    monkeypatch.setattr(triton_prefill, "prefill_split", lambda **_: 64)
    monkeypatch.setattr(
        triton_prefill, "prefill_parts", lambda _, num_splits: num_splits if is_split else 1
    )
    for lookahead in (70, 200):
        options = AttentionOptions(lookahead=lookahead)
        assert_near_twin(prefill(batch, options=options), batch.expected(options=options))


def test_the_last_tokens_of_a_long_context_get_a_program_for_each_split() -> None:
    assert prefill_parts(8, num_splits=5) == 5
    assert prefill_parts(512, num_splits=5) == 1
    assert prefill_parts(64, num_splits=64) == 1  # their results would take too much memory


def test_prefill_leaves_the_tokens_of_the_decodes_before_it() -> None:
    batch = paged_batch(
        [(20, 1), (9, 1), (40, 12)], num_heads=6, num_kv_heads=2, head_size=16, block_size=8
    )
    out = prefill(batch, first_row=2)
    assert (out[:2] == SENTINEL).all()
    assert_near_twin(out[2:], batch.expected()[2:])


def test_a_decode_has_the_same_bits_whoever_shares_the_batch() -> None:
    batch = paged_batch(
        [(5, 1), (700, 1), (SPLIT_TOKENS, 1)],
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        block_size=16,
    )
    together = decode(batch, longest=1000)
    assert_near_twin(together, batch.expected())
    for row, (tokens, _) in enumerate(batch.rows):
        alone = decode(batch.only(row), longest=tokens)
        assert torch.equal(alone, together[row : row + 1])


def test_a_token_has_the_same_bits_in_any_chunk() -> None:
    batch = paged_batch(
        [(110, 100), (40, 40)], num_heads=3, num_kv_heads=1, head_size=32, block_size=16
    )
    whole = prefill(batch)
    for first, end in [(0, 1), (1, 60), (60, 99), (99, 100), (22, 23)]:
        assert torch.equal(prefill(batch.cut(0, first, end)), whole[first:end]), (first, end)


def test_rows_without_tokens_give_zeros_in_decode_and_nothing_in_prefill() -> None:
    batch = paged_batch(
        [(0, 0), (30, 4), (12, 0)], num_heads=4, num_kv_heads=2, head_size=16, block_size=4
    )
    assert_near_twin(prefill(batch), batch.expected())
    padded = paged_batch([(8, 1), (8, 1)], num_heads=4, num_kv_heads=2, head_size=16, block_size=4)
    out = torch.full_like(padded.q, SENTINEL)
    decode_attention(
        padded.q,
        padded.k_cache,
        padded.v_cache,
        out,
        block_tables_BM=padded.block_tables,
        seq_lens_B=torch.tensor([0, 8], dtype=torch.int32),
        max_seq_len=8,
        scale=padded.scale,
    )
    assert (out[0] == 0).all()
    assert_near_twin(out[1:], padded.expected()[1:])


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("num_decodes", [0, 2, 4])
def test_a_step_of_decodes_and_chunks_is_one_call(num_decodes: int) -> None:
    rows = [(70, 1), (9, 1)] + ([(300, 1), (16, 1)] if num_decodes == 4 else [(50, 20), (33, 33)])
    batch = paged_batch(rows, num_heads=6, num_kv_heads=2, head_size=16, block_size=16)
    assert_near_twin(batch.attend(TRITON, num_decodes=num_decodes), batch.expected())


def test_a_step_without_rows_is_fine() -> None:
    batch = paged_batch([], num_heads=4, num_kv_heads=2, head_size=16, block_size=4)
    assert batch.attend(TRITON).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(2, 16), (3, 80)])
def test_write_kv_touches_the_slots_it_is_given_and_no_other(
    num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    fused = torch.randn(5, 2 * num_kv_heads + 1, head_size).to(dtype)
    k, v = fused[:, 1 : num_kv_heads + 1], fused[:, num_kv_heads + 1 :]
    k_cache = torch.full((4, 8, num_kv_heads, head_size), SENTINEL, dtype=torch.float32).to(dtype)
    v_cache = k_cache.clone()
    slots = torch.tensor([31, 0, 9, 8, 17])
    triton_kv_write.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    untouched = torch.full((), SENTINEL).to(dtype)
    assert (k_cache == untouched).all(dim=(2, 3)).sum() == 32 - 5
    assert (v_cache == untouched).all(dim=(2, 3)).sum() == 32 - 5
    triton_kv_write.write_kv(k[:0], v[:0], k_cache, v_cache, slots[:0])
