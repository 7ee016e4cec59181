"""The plain-PyTorch twins against the implementations of PyTorch and transformers."""

import pytest
import torch
from tools.kernels.testing import paged_batch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from quire.kernels.reference import layers as reference
from quire.kernels.reference import paged as twins


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_paged_attention_is_sdpa_on_dense_data(num_heads: int, num_kv_heads: int) -> None:
    batch = paged_batch(
        [(1, 1), (37, 1), (16, 16), (45, 9)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=16,
        block_size=8,
    )
    got = batch.expected()
    for row, (tokens, queries) in enumerate(batch.rows):
        k, v = (x.transpose(0, 1) for x in batch.dense_kv[row])
        start = batch.query_starts[row]
        q = batch.q[start : start + queries].transpose(0, 1)
        # A causal mask aligned to the last token, not the first.
        visible = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        want = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=batch.scale, enable_gqa=True
        )
        torch.testing.assert_close(got[start : start + queries], want[0].transpose(0, 1))


def test_write_kv_touches_the_slots_it_is_given_and_no_other() -> None:
    k, v = torch.randn(2, 3, 2, 4)
    k_cache = torch.full((5, 4, 2, 4), 7.0)
    v_cache = torch.full((5, 4, 2, 4), 8.0)
    twins.write_kv(k, v, k_cache, v_cache, torch.tensor([19, 0, 6]))
    for token, (block, offset) in enumerate([(4, 3), (0, 0), (1, 2)]):
        assert torch.equal(k_cache[block, offset], k[token])
        assert torch.equal(v_cache[block, offset], v[token])
    assert (k_cache == 7.0).all(dim=(2, 3)).sum() == 17
    assert (v_cache == 8.0).all(dim=(2, 3)).sum() == 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 24).to(dtype)
    norm = LlamaRMSNorm(24, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    weight = norm.weight.detach()
    normed, total = reference.rms_norm(x, weight, eps=1e-5)
    assert torch.equal(normed, norm(x))
    assert torch.equal(total, x)
    normed, total = reference.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


def test_rotary_embedding_is_that_of_transformers() -> None:
    x = torch.randn(7, 3, 16)
    angles = torch.randn(7, 8)
    cos, sin = angles.cos(), angles.sin()
    twice = (torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None])
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *twice)
    torch.testing.assert_close(
        reference.rotary_embedding(x, cos, sin), want[0].transpose(0, 1), atol=1e-6, rtol=1e-6
    )


def test_rotary_embedding_leaves_the_channels_past_the_rotated_ones() -> None:
    x = torch.randn(4, 2, 16).bfloat16()
    angles = torch.randn(4, 4)
    out = reference.rotary_embedding(x, angles.cos(), angles.sin())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.equal(out[..., :8], x[..., :8])


def test_silu_and_mul_takes_the_gate_from_the_first_half() -> None:
    gate, up = torch.randn(2, 5, 6)
    got = reference.silu_and_mul(torch.cat([gate, up], -1))
    torch.testing.assert_close(got, gate / (1 + torch.exp(-gate)) * up)


def test_rotating_and_writing_at_once_is_one_after_the_other() -> None:
    qkv = torch.randn(3, 6 + 2 * 2, 8)
    angles = torch.randn(3, 4)
    cos, sin = angles.cos(), angles.sin()
    k_cache, v_cache = torch.full((2, 5, 4, 2, 8), 7.0)
    slots = torch.tensor([19, 0, 6])
    q = twins.rotate_and_write_kv(qkv, cos, sin, k_cache, v_cache, slots)
    assert torch.equal(q, reference.rotary_embedding(qkv[:, :6], cos, sin))
    rotated = reference.rotary_embedding(qkv[:, 6:8], cos, sin)
    assert torch.equal(k_cache.flatten(0, 1)[slots], rotated)
    assert torch.equal(v_cache.flatten(0, 1)[slots], qkv[:, 8:])
