"""The native attention against its twin, and that no row of a batch changes another's bits."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.kernels.conftest import ISAS
from tools.kernels.testing import PagedBatch, assert_near_twin, paged_batch

from quire import native_build
from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.native import library as native
from quire.kernels.native.backend import NativeBackend
from quire.kernels.quantization import SCALE_BYTES
from quire.kernels.reference import paged as twins

SPLIT = 128  # kSplitTokens of native/attention_tile.h
RAGGED = [
    *[(1, 1), (300, 1), (SPLIT, 1), (SPLIT + 1, 1), (0, 0), (9, 0)],
    *[(5, 5), (2 * SPLIT, 70), (333, 333), (2 * SPLIT + 16, 2)],
]


@pytest.fixture(params=ISAS)
def any_isa(request: pytest.FixtureRequest) -> NativeBackend:
    return _backend(request.param)


@pytest.fixture
def best() -> NativeBackend:
    return _backend(native.available_isas()[0])


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.quick_cells("dtype0-8", "dtype1-16")
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_the_twin(
    any_isa: NativeBackend, dtype: torch.dtype, block_size: int
) -> None:
    for num_heads, num_kv_heads, head_size in [(6, 2, 64), (4, 1, 80), (2, 2, 16), (8, 1, 32)]:
        batch = paged_batch(
            RAGGED,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
        )
        assert_near_twin(batch.stored_by(any_isa).attend(any_isa), batch.expected())


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 1), (20, 4), (3, 3)])
def test_a_head_of_256_channels_and_odd_groups_are_the_twins(
    best: NativeBackend, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=256,
        block_size=16,
        dtype=dtype,
    )
    assert_near_twin(batch.stored_by(best).attend(best), batch.expected())


def test_bfloat16_loses_no_more_than_its_own_rounding(best: NativeBackend) -> None:
    batch = paged_batch(
        [(700, 64)],
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        dtype=torch.bfloat16,
    )
    dense = [(k.double(), v.double()) for k, v in batch.dense_kv]
    exact = _dense_attention(replace(batch, q=batch.q.double(), dense_kv=dense))
    rounding = (exact.bfloat16() - exact).square().mean().sqrt()
    error = (batch.stored_by(best).attend(best) - exact).square().mean().sqrt()
    assert error < 2 * rounding


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_an_int8_cache_is_that_of_the_twin(
    any_isa: NativeBackend, dtype: torch.dtype, block_size: int
) -> None:
    for num_heads, num_kv_heads, head_size in [(6, 2, 64), (4, 1, 80), (7, 1, 256), (8, 1, 32)]:
        batch = paged_batch(
            RAGGED,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
        )
        expected = batch.stored_by(twins, int8=True).expected()
        assert_near_twin(batch.stored_by(any_isa, int8=True).attend(any_isa), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (8, 1)])
def test_a_row_has_the_same_bits_whoever_shares_the_batch(
    best: NativeBackend, num_heads: int, num_kv_heads: int, dtype: torch.dtype, int8: bool
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=64,
        block_size=16,
        dtype=dtype,
    ).stored_by(best, int8=int8)
    _assert_rows_are_as_if_alone(batch, best)


@pytest.mark.quick_cells(12)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_a_shared_prefix_does_not_change_a_bit(
    any_isa: NativeBackend, block_size: int, dtype: torch.dtype, int8: bool
) -> None:
    # Rows 3 and 1 share 5 splits and more, 0 shares 3 of them, 4 less than one, 2 nothing; row 5
    # is a prompt behind a cached prefix, and row 6 ends where its prefix does.
    batch = paged_batch(
        [(700, 1), (800, 1), (500, 1), (900, 1), (300, 1), (420, 20), (2 * SPLIT, 1)],
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        block_size=block_size,
        dtype=dtype,
    )
    for row, shared in [(3, 704), (0, 448), (4, 64), (5, 384), (6, 2 * SPLIT)]:
        batch = batch.with_shared_prefix(1, row, shared // block_size)
    batch = batch.stored_by(any_isa, int8=int8)
    _assert_rows_are_as_if_alone(batch, any_isa)


@pytest.mark.quick_cells(12)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(6, 2, 64), (3, 3, 32), (2, 1, 128)]
)
def test_a_token_has_the_same_bits_in_any_chunk_and_as_a_decode(
    any_isa: NativeBackend,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    int8: bool,
) -> None:
    batch = paged_batch(
        [(400, 390)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=16,
        dtype=dtype,
    ).stored_by(any_isa, int8=int8)
    whole = batch.attend(any_isa)
    for cuts in ([0, 7, 118, 119, 246, 247, 390], [0, 389, 390], [0, 128, 256, 384, 390]):
        for first, end in itertools.pairwise(cuts):
            chunk = batch.cut(0, first, end).attend(any_isa)
            assert torch.equal(chunk, whole[first:end]), (first, end)
    for token in range(0, 390, 31):
        decode = batch.cut(0, token, token + 1).attend(any_isa)
        assert torch.equal(decode, whole[token : token + 1])


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("queries", [1, 5])
def test_threads_that_share_one_long_row_give_its_bits(
    best: NativeBackend, queries: int, window: int | None
) -> None:
    # The windows of the row's queries, from 2000 on, begin in two splits.
    batch = paged_batch(
        [(5050, queries)], num_heads=3, num_kv_heads=1, head_size=64, block_size=16
    ).stored_by(best)
    options = AttentionOptions(window=window)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.attend(best, options=options)
        for num_threads in (2, 7):
            torch.set_num_threads(num_threads)
            for _ in range(3):  # The last thread to end adds up the splits.
                assert torch.equal(batch.attend(best, options=options), alone)
    finally:
        torch.set_num_threads(before)
    assert_near_twin(alone, _dense_attention(batch, window=window))


@pytest.mark.quick_cells(6)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 60, SPLIT, 201, 10_000])
def test_a_window_and_a_cap_are_those_of_the_twin(
    any_isa: NativeBackend, window: int | None, cap: float | None
) -> None:
    options = AttentionOptions(window=window, soft_cap=cap)
    for block_size, dtype in [(4, torch.bfloat16), (16, torch.float32), (64, torch.bfloat16)]:
        batch = paged_batch(
            [*RAGGED, (700, 260)],
            num_heads=6,
            num_kv_heads=2,
            head_size=32,
            block_size=block_size,
            dtype=dtype,
        )
        got = batch.stored_by(any_isa).attend(any_isa, options=options)
        assert_near_twin(got, batch.expected(options=options))
    got = batch.stored_by(any_isa, int8=True).attend(any_isa, options=options)
    expected = batch.stored_by(twins, int8=True).expected(options=options)
    assert_near_twin(got, expected)


@pytest.mark.quick_cells(6)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("lookahead", [1, 70, 1 << 30])
def test_a_lookahead_is_that_of_the_twin_in_any_batch(
    any_isa: NativeBackend, lookahead: int, window: int | None
) -> None:
    options = AttentionOptions(window=window, lookahead=lookahead)
    batch = paged_batch(
        [(300, 300), (1, 1), (129, 129), (40, 40)],
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        block_size=16,
    )
    stored = batch.stored_by(any_isa)
    got = stored.attend(any_isa, options=options)
    assert_near_twin(got, batch.expected(options=options))
    _assert_rows_are_as_if_alone(stored, any_isa, options)


@pytest.mark.quick_cells(12)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [60, 300])
def test_windowed_rows_have_the_same_bits_in_any_batch_and_chunk(
    any_isa: NativeBackend, window: int, dtype: torch.dtype, int8: bool
) -> None:
    options = AttentionOptions(window=window, soft_cap=3.0)
    # The first three share a prefix that is longer than the window, the fourth one that is not.
    batch = paged_batch(
        [(700, 1), (800, 1), (680, 30), (500, 1), (420, 420)],
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        block_size=16,
        dtype=dtype,
    )
    for row, shared in [(1, 640), (2, 640), (3, 256)]:
        batch = batch.with_shared_prefix(0, row, shared // 16)
    batch = batch.stored_by(any_isa, int8=int8)
    _assert_rows_are_as_if_alone(batch, any_isa, options)
    whole = batch.only(4).attend(any_isa, options=options)
    cuts = [0, 1, 59, 61, 128, 129, 190, 256, 301, 420]
    for first, end in [*itertools.pairwise(cuts), *((at, at + 1) for at in range(40, 420, 47))]:
        chunk = batch.cut(4, first, end).attend(any_isa, options=options)
        assert torch.equal(chunk, whole[first:end]), (first, end)


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("window", [None, 100])
def test_sinks_are_those_of_the_twin_in_any_batch(
    any_isa: NativeBackend, window: int | None
) -> None:
    options = AttentionOptions(window=window, sinks=(-2.0, 0.0, 1.0, 3.0, -300.0, 300.0))
    batch = paged_batch(RAGGED, num_heads=6, num_kv_heads=2, head_size=32, block_size=16)
    got = batch.stored_by(any_isa).attend(any_isa, num_decodes=4, options=options)
    assert_near_twin(got, batch.expected(options=options))
    _assert_rows_are_as_if_alone(batch.stored_by(any_isa), any_isa, options)
    with pytest.raises(ValueError, match="2 sinks: must be 6, one for each query head"):
        batch.attend(any_isa, options=AttentionOptions(sinks=(0.0, 1.0)))


def test_what_is_before_all_windows_is_not_read(any_isa: NativeBackend) -> None:
    options = AttentionOptions(window=150)
    batch = paged_batch(
        [(900, 1), (700, 20)], num_heads=4, num_kv_heads=2, head_size=32, block_size=16
    ).stored_by(any_isa)
    expected = batch.attend(any_isa, options=options)
    for row, (tokens, queries) in enumerate(batch.rows):
        before = (tokens - queries + 1 - 150) // 16
        for cache in (batch.k_cache, batch.v_cache):
            cache[batch.block_tables[row, :before].long()] = float("nan")
    assert torch.equal(batch.attend(any_isa, options=options), expected)


def test_a_step_without_rows_and_a_row_without_queries_are_fine(any_isa: NativeBackend) -> None:
    for rows in ([], [(0, 0), (9, 2), (5, 0)]):
        batch = paged_batch(rows, num_heads=4, num_kv_heads=2, head_size=16, block_size=4)
        torch.testing.assert_close(batch.stored_by(any_isa).attend(any_isa), batch.expected())


def test_queries_may_be_views_into_a_fused_projection(any_isa: NativeBackend) -> None:
    batch = paged_batch([(40, 3)], num_heads=6, num_kv_heads=2, head_size=16, block_size=4)
    batch = batch.stored_by(any_isa)
    fused = torch.randn(3, 10, 16)
    fused[:, :6] = batch.q
    want = batch.attend(any_isa)
    assert torch.equal(replace(batch, q=fused[:, :6]).attend(any_isa), want)


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_stores_each_value_once_and_touches_nothing_else(
    best: NativeBackend, dtype: torch.dtype, block_size: int
) -> None:
    slots = torch.tensor([31, 0, 9, 8, 17])
    values = torch.arange(2 * 5 * 2 * 16).to(dtype).view(5, 4, 16)  # a fused projection
    k, v = values[:, :2], values[:, 2:]
    k_cache = torch.full((64 // block_size, block_size, 2, 16), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    best.write_kv(k, v, k_cache, v_cache, slots)
    for cache, written in ((k_cache, k), (v_cache, v)):
        stored = cache[~cache.isnan()]
        assert torch.equal(stored.sort().values, written.flatten().sort().values)
    touched = (~k_cache.isnan()).flatten(1).any(1).nonzero().flatten()
    assert touched.tolist() == sorted({slot // block_size for slot in slots.tolist()})


@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_cache_holds_what_the_twins_does_and_nothing_else_is_touched(
    any_isa: NativeBackend, dtype: torch.dtype, block_size: int
) -> None:
    slots = torch.tensor([31, 0, 9, 8, 17])
    values = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[1] = 0
    shape = (64 // block_size, block_size, 2, 16 + SCALE_BYTES)
    caches = [torch.full(shape, -128, dtype=torch.int8) for _ in range(4)]
    for writer, (k_cache, v_cache) in ((any_isa, caches[:2]), (twins, caches[2:])):
        writer.write_kv(values[:, :2], values[:, 2:], k_cache, v_cache, slots)
    for native_cache, twin_cache in zip(caches[:2], caches[2:], strict=True):
        # The order within a block is the library's own.
        native_bytes, twin_bytes = (c.flatten(1).sort(1).values for c in (native_cache, twin_cache))
        assert torch.equal(native_bytes, twin_bytes)


@pytest.mark.usefixtures("threads")
def test_a_decode_of_length_0_gets_zeros(any_isa: NativeBackend) -> None:
    batch = paged_batch(
        [(40, 1), (0, 1), (9, 1)], num_heads=4, num_kv_heads=2, head_size=16, block_size=4
    )
    batch = batch.stored_by(any_isa)
    batch.attend(any_isa)  # fills the thread's scratch memory with other values than zeros
    out = batch.attend(any_isa)
    assert torch.equal(out[1], torch.zeros(4, 16))
    assert torch.equal(out[0], batch.only(0).attend(any_isa)[0])


def test_a_wrong_index_is_refused_before_anything_is_written(best: NativeBackend) -> None:
    batch = paged_batch([(40, 3)], num_heads=4, num_kv_heads=2, head_size=16, block_size=16)
    num_slots = batch.k_cache.shape[0] * 16
    values = torch.zeros(2, 2, 16)
    before = batch.k_cache.clone()
    for slot in (-1, num_slots):
        with pytest.raises(IndexError, match=f"slot {slot}, must be below {num_slots}"):
            best.write_kv(values, values, batch.k_cache, batch.v_cache, torch.tensor([0, slot]))
    torch.testing.assert_close(batch.k_cache, before, atol=0, rtol=0, equal_nan=True)
    with pytest.raises(IndexError, match="block id"):
        replace(batch, block_tables=batch.block_tables + len(before)).attend(best)
    with pytest.raises(IndexError, match=r"length of a sequence 40, must be from 3 to 32"):
        replace(batch, block_tables=batch.block_tables[:, :2]).attend(best)
    with pytest.raises(IndexError, match="start of queries 3, must be below 3"):
        replace(batch, q=batch.q[:2]).attend(best)


def test_a_wrong_shape_or_type_is_refused(best: NativeBackend) -> None:
    batch = paged_batch([(40, 3)], num_heads=4, num_kv_heads=2, head_size=16, block_size=16)
    values, slots = torch.zeros(2, 2, 16), torch.tensor([0, 1])
    for message, arguments in [
        ("slot mapping: .*int32", (values, values, batch.k_cache, batch.v_cache, slots.int())),
        ("slot mapping", (values, values, batch.k_cache, batch.v_cache, slots[:1])),
        ("V: ", (values, values[:1], batch.k_cache, batch.v_cache, slots)),
        ("K cache", (values[:, :1], values[:, :1], batch.k_cache, batch.v_cache, slots)),
        ("V cache", (values, values, batch.k_cache, batch.v_cache[1:], slots)),
    ]:
        with pytest.raises(ValueError, match=message):
            best.write_kv(*arguments)
    for message, wrong in [
        ("3 query heads: must be a multiple of 2", replace(batch, q=batch.q[:, :3])),
        ("V cache", replace(batch, v_cache=batch.v_cache.bfloat16())),
        ("block tables", replace(batch, block_tables=batch.block_tables.long())),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong.attend(best)


def _backend(isa: str) -> NativeBackend:
    try:
        return NativeBackend(native.load(isa))
    except native_build.BuildError as error:
        pytest.skip(str(error))


def _assert_rows_are_as_if_alone(
    batch: PagedBatch, backend: NativeBackend, options: AttentionOptions = PLAIN
) -> None:
    together = batch.attend(backend, options=options)
    for row, (_, queries) in enumerate(batch.rows):
        start = batch.query_starts[row]
        alone = batch.only(row).attend(backend, options=options)
        assert torch.equal(alone, together[start : start + queries]), row


def _dense_attention(batch: PagedBatch, *, window: int | None = None) -> torch.Tensor:
    """Plain attention of one row without paging, in the dtype of its inputs."""
    ((tokens, queries),) = batch.rows
    ((k, v),) = batch.dense_kv
    group = batch.q.shape[1] // k.shape[1]
    k_HLD, v_HLD = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores_HQL = batch.q.transpose(0, 1) @ k_HLD.transpose(1, 2) * batch.scale
    hidden_QL = torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries + 1)
    if window is not None:
        hidden_QL |= ~torch.ones_like(hidden_QL).triu(tokens - queries + 1 - window)
    weights_HQL = scores_HQL.masked_fill(hidden_QL, float("-inf")).softmax(-1)
    return (weights_HQL @ v_HLD).transpose(0, 1)
