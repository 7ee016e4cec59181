"""The twins against PyTorch's and transformers' own implementations of the same thing."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from quire.kernels import reference
from quire.kernels.testing import paged_batch
from quire.worker import sampler


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
        # A causal mask that is flush with the last token, not the first.
        visible = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        want = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=batch.scale, enable_gqa=True
        )
        torch.testing.assert_close(got[start : start + queries], want[0].transpose(0, 1))


def test_write_kv_touches_the_slots_it_is_given_and_no_other() -> None:
    k, v = torch.randn(2, 3, 2, 4)
    k_cache = torch.full((5, 4, 2, 4), 7.0)
    v_cache = torch.full((5, 4, 2, 4), 8.0)
    reference.write_kv(k, v, k_cache, v_cache, torch.tensor([19, 0, 6]))
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
    q = reference.rotate_and_write_kv(qkv, cos, sin, k_cache, v_cache, slots)
    assert torch.equal(q, reference.rotary_embedding(qkv[:, :6], cos, sin))
    rotated = reference.rotary_embedding(qkv[:, 6:8], cos, sin)
    assert torch.equal(k_cache.flatten(0, 1)[slots], rotated)
    assert torch.equal(v_cache.flatten(0, 1)[slots], qkv[:, 8:])


def test_sampling_weights_are_those_of_exact_arithmetic_to_the_last_bits_of_float32() -> None:
    logits = torch.linspace(-30, 4, 5000)
    for temperature in (0.5, 1.0, 3.0):
        got = reference.sampling_weights(logits, temperature=torch.tensor(temperature))
        want = 2.0**32 * torch.exp((logits.double() - 4) / temperature)
        assert got[-1] == 2**32
        # Half a rounding of the exponent, of up to 40, and a few of the polynomial.
        assert torch.all((got - want).abs() <= want * 3e-6 + 1)


@pytest.mark.parametrize("position", [0, 1, 2**31])
def test_the_random_number_is_that_of_the_sampler(position: int) -> None:
    seeds = [0, 1, 2**40 + 7, 2**63 - 1]
    want = sampler.uniforms(np.array(seeds), np.full(4, position))
    assert [reference.random_uniform(seed, position) for seed in seeds] == want.tolist()


def test_sampling_keeps_what_every_limit_allows() -> None:
    draws = 2000
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0]).expand(draws, -1)
    ones, zeros = torch.ones(draws), torch.zeros(draws)
    kept = {}
    for name, limits in {
        "none": (0, 1.0, 0.0),
        "top-k 3": (3, 1.0, 0.0),
        "top-k 2": (2, 1.0, 0.0),
        "top-p": (0, 0.6, 0.0),
        "min-p": (0, 1.0, 0.2),
        "top-k, then top-p": (2, 0.7, 0.0),
    }.items():
        tokens = reference.sample(
            logits,
            temperature_S=ones,
            top_k_S=zeros.int() + limits[0],
            top_p_S=ones * limits[1],
            min_p_S=ones * limits[2],
            seed_S=zeros.long(),
            position_S=torch.arange(draws),
        )
        kept[name] = set(tokens.tolist())
    # Probabilities 0.53, 0.07, 0.20, 0.20, 0.03; of the two most probable 0.73 and 0.27.
    assert kept == {
        "none": {0, 1, 2, 3, 4},
        "top-k 3": {0, 2, 3},
        "top-k 2": {0, 2},
        "top-p": {0, 2},
        "min-p": {0, 2, 3},
        "top-k, then top-p": {0},
    }
