"""The Triton backend against the twins on a real GPU, and its batch invariance."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tools.kernels.testing import (
    PagedBatch,
    adjustments,
    assert_near_twin,
    paged_batch,
    shared_splits,
)

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import AttentionBackend, backend_for
from quire.kernels.batch import Rows
from quire.kernels.reference import layers as reference
from quire.kernels.reference import paged as twins
from quire.kernels.reference import sampling as reference_sampling
from quire.kernels.triton.launch import SPLIT_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RAGGED = [(1, 1), (256, 1), (257, 1), (1500, 1), (5, 5), (300, 70), (333, 333)]
NUM_DECODES = 4
HALVES = [torch.bfloat16, torch.float16]


def ragged(dtype: torch.dtype) -> PagedBatch:
    return paged_batch(
        RAGGED,
        num_heads=6,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        dtype=dtype,
        device="cuda",
    )


@pytest.fixture
def triton() -> AttentionBackend:
    return backend_for(torch.device("cuda"))


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_attention_is_that_of_the_twin(
    triton: AttentionBackend, dtype: torch.dtype, head_size: int, block_size: int
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=6,
        num_kv_heads=2,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        device="cuda",
    )
    assert_near_twin(batch.attend(triton, num_decodes=NUM_DECODES), batch.expected())
    assert_near_twin(batch.attend(triton, num_decodes=0), batch.expected())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 1), (34, 2), (14, 2)])
def test_any_ratio_of_heads_is_that_of_the_twin(
    triton: AttentionBackend, num_heads: int, num_kv_heads: int
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=64,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert_near_twin(batch.attend(triton, num_decodes=NUM_DECODES), batch.expected())


@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_has_the_same_bits_whoever_shares_the_batch(
    triton: AttentionBackend, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        dtype=dtype,
        device="cuda",
    )
    together = batch.attend(triton, num_decodes=NUM_DECODES)
    for row, (_, queries) in enumerate(batch.rows):
        start = batch.query_starts[row]
        alone = batch.only(row).attend(triton, num_decodes=int(row < NUM_DECODES))
        assert torch.equal(alone, together[start : start + queries]), row


@pytest.mark.parametrize("dtype", HALVES)
def test_a_token_has_the_same_bits_in_any_chunk(
    triton: AttentionBackend, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        [(700, 650)],
        num_heads=6,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        dtype=dtype,
        device="cuda",
    )
    whole = batch.attend(triton)
    for first, end in [(0, 1), (0, 333), (333, 650), (77, 78), (649, 650), (100, 200)]:
        assert torch.equal(batch.cut(0, first, end).attend(triton), whole[first:end]), (first, end)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_write_kv_does_what_the_twin_does(triton: AttentionBackend, dtype: torch.dtype) -> None:
    fused = torch.randn(50, 12, 80, device="cuda").to(dtype)
    slots = torch.randperm(16 * 8, device="cuda")[:50]
    k_cache = torch.full((16, 8, 2, 80), 7.0, dtype=dtype, device="cuda")
    v_cache = k_cache.clone()
    want_k, want_v = k_cache.clone(), k_cache.clone()
    triton.write_kv(fused[:, 8:10], fused[:, 10:], k_cache, v_cache, slots)
    twins.write_kv(fused[:, 8:10], fused[:, 10:], want_k, want_v, slots)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("head_size", [16, 80, 128])
def test_rotating_and_writing_at_once_does_what_the_twin_does(
    triton: AttentionBackend, head_size: int, dtype: torch.dtype
) -> None:
    qkv = torch.randn(50, 10, head_size, device="cuda").to(dtype)
    angles = torch.randn(50, head_size // 2, device="cuda")
    slots = torch.randperm(16 * 8, device="cuda")[:50]
    got, want = torch.full((2, 2, 16, 8, 2, head_size), 7.0, dtype=dtype, device="cuda")
    arguments = (qkv, angles.cos(), angles.sin())
    q = triton.rotate_and_write_kv(*arguments, got[0], got[1], slots)
    assert_near_twin(q, twins.rotate_and_write_kv(*arguments, want[0], want[1], slots))
    assert_near_twin(got, want)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(window=33),
        AttentionOptions(window=600, soft_cap=2.0),
        AttentionOptions(soft_cap=20.0),
    ],
)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_windows_and_soft_caps_are_those_of_the_twin(
    triton: AttentionBackend, dtype: torch.dtype, options: AttentionOptions
) -> None:
    batch = ragged(dtype)
    want = batch.expected(options=options)
    for num_decodes in (0, NUM_DECODES):
        assert_near_twin(batch.attend(triton, num_decodes=num_decodes, options=options), want)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float8_cache_is_written_and_read_as_the_twin_does(
    triton: AttentionBackend, dtype: torch.dtype
) -> None:
    options = AttentionOptions(k_scale=0.02, v_scale=0.03)
    batch = ragged(dtype)
    shape = (2, *batch.k_cache.shape)
    k_cache, v_cache = torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn)
    for (tokens, _), (k, v), table in zip(
        batch.rows, batch.dense_kv, batch.block_tables, strict=True
    ):
        token = torch.arange(tokens, device="cuda")
        slots = table[token // 16].long() * 16 + token % 16
        triton.write_kv(k, v, k_cache, v_cache, slots, options=options)
        wanted = torch.zeros(shape[1:], device="cuda").to(torch.float8_e4m3fn)
        twins.write_kv(k, v, wanted, wanted.clone(), slots, options=options)
        written = k_cache.flatten(0, 1).view(torch.uint8)[slots]
        assert torch.equal(written, wanted.flatten(0, 1).view(torch.uint8)[slots])
    quantized = replace(batch, k_cache=k_cache, v_cache=v_cache)
    want = quantized.expected(options=options)
    for num_decodes in (0, NUM_DECODES):
        got = quantized.attend(triton, num_decodes=num_decodes, options=options)
        assert_near_twin(got, want)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("num_heads", [6, 16])
def test_reading_a_shared_prefix_once_changes_no_bit(
    triton: AttentionBackend, num_heads: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        [(1500, 1)] * 7 + [(700, 1), (9, 1), (64, 64)],
        num_heads=num_heads,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        dtype=dtype,
        device="cuda",
    )
    for other, num_splits in ((1, 5), (2, 5), (3, 2), (5, 3), (6, 5), (7, 2)):
        batch = batch.with_shared_prefix(0, other, num_splits * SPLIT_TOKENS // 16)
    shared = shared_splits(batch, num_decodes=9)
    assert shared is not None
    apart = batch.attend(triton, num_decodes=9)
    assert torch.equal(batch.attend(triton, num_decodes=9, shared=shared), apart)
    assert_near_twin(apart, batch.expected())
    if dtype != torch.float32:
        k_cache, v_cache = (c.to(torch.float8_e4m3fn) for c in (batch.k_cache, batch.v_cache))
        rounded = replace(batch, k_cache=k_cache, v_cache=v_cache)
        apart = rounded.attend(triton, num_decodes=9)
        assert torch.equal(rounded.attend(triton, num_decodes=9, shared=shared), apart)


def test_a_decode_in_a_cuda_graph_has_the_same_bits(triton: AttentionBackend) -> None:
    batch = paged_batch(
        [(1, 1), (700, 1), (256, 1)],
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    call = batch.call(triton, num_decodes=3)
    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("vocab_size", [1, 1000, 128256])
def test_sampled_tokens_are_those_of_the_twin(vocab_size: int) -> None:
    from quire.kernels.triton.sample import sample

    rng = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(24, vocab_size, generator=rng) * 3
    row = torch.arange(24)
    parameters = {
        "temperature_S": (row % 4) * 0.5,
        "top_k_S": torch.tensor([0, 50, 3]).repeat(8).int(),
        "top_p_S": torch.tensor([1.0, 0.9]).repeat(12),
        "min_p_S": torch.tensor([0.0, 0.0, 0.05, 0.3, 0.0, 0.1]).repeat(4),
        "seed_S": row * 977,
        "position_S": row * 31,
    }
    on_gpu = {name: values.cuda() for name, values in parameters.items()}
    got = sample(logits.cuda(), **on_gpu)
    assert got.tolist() == reference_sampling.sample(logits, **parameters).tolist()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_norms_and_activations_are_those_of_the_twin(
    triton: AttentionBackend, dtype: torch.dtype
) -> None:
    from quire.kernels.triton.elementwise import silu_and_mul

    x, residual = torch.randn(2, 7, 4096, device="cuda").to(dtype)
    weight = torch.randn(4096, device="cuda").to(dtype)
    got, got_sum = triton.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    want, want_sum = reference.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    assert_near_twin(got, want)
    assert torch.equal(got_sum, want_sum)
    assert_near_twin(silu_and_mul(x), reference.silu_and_mul(x))


def test_adjusted_logits_have_the_bits_of_the_twin() -> None:
    from quire.kernels.triton.logits import adjust_logits

    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    arguments = adjustments(8, 5000, num_pairs=9000)
    got = logits.cuda()
    adjust_logits(got, **{name: values.cuda() for name, values in arguments.items()})
    reference_sampling.adjust_logits(logits, **arguments)
    assert torch.equal(got.cpu(), logits)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_run_at_the_same_time_all_get_the_sum(size: int, dtype: torch.dtype) -> None:
    """Streams of one GPU stand for ranks; each kernel waits for the flags of the others."""
    from tools.kernels.ranks import LocalRanks

    from quire.kernels.triton.all_reduce import all_reduce

    # Compiled first: loading code may wait for all running kernels, which would deadlock.
    LocalRanks(size, dtype, "cuda").reduce_alone(0, [torch.ones(8, device="cuda").to(dtype)] * size)
    ranks = LocalRanks(size, dtype, "cuda")
    streams = [torch.cuda.Stream() for _ in range(size)]  # type: ignore[no-untyped-call]
    for num_values in (8, 4096, 60_000, 4096, 16):
        inputs = torch.randn(size, num_values, device="cuda").to(dtype)
        want = inputs[0].float()
        for x in inputs[1:]:
            want = want + x.float()
        outputs = [x.clone() for x in inputs]
        torch.cuda.synchronize()
        for stream, x, mine in zip(streams, outputs, ranks.peers, strict=True):
            with torch.cuda.stream(stream):
                all_reduce(x, mine)
        torch.cuda.synchronize()
        for x in outputs:
            assert torch.equal(x, want.to(dtype))


def test_slots_past_two_to_the_31_elements_are_found(triton: AttentionBackend) -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    num_blocks = (1 << 31) // (16 * 8 * 128) + 2
    k_cache = torch.zeros(num_blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    k, v, q = torch.randn(3, 16, 8, 128, device="cuda").bfloat16()
    last = (num_blocks - 1) * 16
    triton.write_kv(k, v, k_cache, v_cache, torch.arange(last, last + 16, device="cuda"))
    assert torch.equal(k_cache[-1], k)
    assert torch.equal(v_cache[-1], v)
    tables: dict[str, Any] = {
        "block_tables_BM": torch.tensor([[num_blocks - 1]], dtype=torch.int32, device="cuda"),
        "seq_lens_B": torch.tensor([16], dtype=torch.int32, device="cuda"),
    }
    for num_queries, num_decodes in ((1, 1), (16, 0)):
        starts = torch.tensor([0, num_queries], dtype=torch.int32, device="cuda")
        got = triton.attend(
            q[-num_queries:],
            k_cache,
            v_cache,
            Rows(
                **tables,
                query_starts_B1=starts,
                num_decodes=num_decodes,
                max_query_len=num_queries,
                max_seq_len=16,
            ),
            scale=0.1,
        )
        want = twins.paged_attention(
            q[-num_queries:], k_cache, v_cache, **tables, query_starts_B1=starts, scale=0.1
        )
        assert_near_twin(got, want)
