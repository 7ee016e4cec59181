"""The Triton backend against the twins on a real GPU, and its promise about a row's bits."""

from typing import Any

import pytest
import torch

from quire.kernels import reference
from quire.kernels.backend import AttentionBackend, backend_for
from quire.kernels.testing import assert_near_twin, paged_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RAGGED = [(1, 1), (256, 1), (257, 1), (1500, 1), (5, 5), (300, 70), (333, 333)]
NUM_DECODES = 4
HALVES = [torch.bfloat16, torch.float16]


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
    reference.write_kv(fused[:, 8:10], fused[:, 10:], want_k, want_v, slots)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


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
            **tables,
            query_starts_B1=starts,
            num_decodes=num_decodes,
            max_query_len=num_queries,
            max_seq_len=16,
            scale=0.1,
        )
        want = reference.paged_attention(
            q[-num_queries:], k_cache, v_cache, **tables, query_starts_B1=starts, scale=0.1
        )
        assert_near_twin(got, want)
