"""The norm, activation and rotary kernels against their twins, in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os

import pytest
import torch
from torch import Tensor

from quire.kernels.reference import paged as twins

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from tools.kernels.testing import assert_near_twin

from quire.kernels.reference import layers as reference
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.elementwise import silu_and_mul
from quire.kernels.triton.launch import ACTIVATION_BLOCK, MAX_CHANNELS

TRITON = TritonBackend()
SENTINEL = 12345.0
DTYPES = [torch.float32, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_channels", [1, 48, 200])
def test_rms_norm_is_its_twin(num_channels: int, dtype: torch.dtype) -> None:
    # Strided rows, with values between them that no row may read.
    wide = torch.full((5, num_channels + 3), SENTINEL).to(dtype)
    x = wide[:, :num_channels]
    x.copy_(randn(5, num_channels, dtype=dtype))
    weight = randn(num_channels, dtype=dtype)
    got, same = TRITON.rms_norm(x, weight, eps=1e-5)
    want, _ = reference.rms_norm(x, weight, eps=1e-5)
    assert_near_twin(got, want)
    assert same is x


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_and_leaves_both_inputs(dtype: torch.dtype) -> None:
    x, residual = randn(2, 4, 96, dtype=dtype)
    before = x.clone(), residual.clone()
    weight = randn(96, dtype=dtype)
    got, got_sum = TRITON.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    want, want_sum = reference.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    assert_near_twin(got, want)
    assert torch.equal(got_sum, want_sum)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("num_channels", [1, 48, 200])
def test_wide_norm_is_its_twin(num_channels: int, is_centred: bool, dtype: torch.dtype) -> None:
    wide = torch.full((5, num_channels + 3), SENTINEL).to(dtype)
    x = wide[:, :num_channels]
    x.copy_(randn(5, num_channels, dtype=dtype))
    weight, bias = randn(num_channels), randn(num_channels + 1)[1:]
    for each in (None, bias):
        got = TRITON.wide_norm(x, weight, each, eps=1e-5, is_centred=is_centred)
        want = reference.wide_norm(x, weight, each, eps=1e-5, is_centred=is_centred)
        assert_near_twin(got, want)


def test_a_row_too_long_for_the_norm_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=rf"num_channels={MAX_CHANNELS + 1}: .*{MAX_CHANNELS}"):
        TRITON.rms_norm(torch.zeros(1, MAX_CHANNELS + 1), torch.zeros(MAX_CHANNELS + 1), eps=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 40, ACTIVATION_BLOCK + 8])
def test_silu_and_mul_is_its_twin(size: int, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * size, dtype=dtype) * 4
    assert_near_twin(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_a_gated_layer_is_a_linear_one_and_the_activation() -> None:
    x, weight = randn(3, 8), randn(20, 8)
    got = TRITON.pack_gated_linear(weight)(x)
    assert_near_twin(got, reference.silu_and_mul(x @ weight.T))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "half"),
    [(6, 2, 64, 32), (3, 3, 80, 20), (70, 1, 16, 8)],
)
def test_rotating_and_writing_at_once_is_its_twin(
    num_heads: int, num_kv_heads: int, head_size: int, half: int, dtype: torch.dtype
) -> None:
    qkv = randn(5, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    angles = randn(5, half)
    caches = torch.full((4, 4, 8, num_kv_heads, head_size), SENTINEL).to(dtype)
    slots = torch.tensor([31, 0, 9, 8, 17])
    got = TRITON.rotate_and_write_kv(qkv, angles.cos(), angles.sin(), caches[0], caches[1], slots)
    want = twins.rotate_and_write_kv(qkv, angles.cos(), angles.sin(), caches[2], caches[3], slots)
    assert torch.equal(got, want)
    assert torch.equal(caches[:2], caches[2:])


def test_a_step_without_tokens_is_fine() -> None:
    empty = torch.empty(0, 4, 16)
    cache = torch.full((2, 4, 1, 16), SENTINEL)
    angles, slots = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    assert TRITON.rms_norm(empty[:, 0], torch.ones(16), eps=1e-5)[0].shape == (0, 16)
    assert silu_and_mul(empty[:, 0]).shape == (0, 8)
    q = TRITON.rotate_and_write_kv(empty, angles, angles, cache, cache, slots)
    assert q.shape == (0, 2, 16)
    assert (cache == SENTINEL).all()
