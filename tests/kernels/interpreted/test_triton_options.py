"""Sliding windows, soft caps and float8 caches against the twins, in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os
from dataclasses import replace

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

from tools.kernels.testing import PagedBatch, assert_near_twin, paged_batch

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.launch import SPLIT_TOKENS

TRITON = TritonBackend()
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16]


def attend(batch: PagedBatch, options: AttentionOptions, *, num_decodes: int) -> Tensor:
    return batch.attend(TRITON, num_decodes=num_decodes, options=options)


def expected(batch: PagedBatch, options: AttentionOptions) -> Tensor:
    return batch.expected(options=options)


def ragged(dtype: torch.dtype) -> PagedBatch:
    return paged_batch(
        [(SPLIT_TOKENS + 70, 1), (3, 1), (40, 40), (70, 20)],
        num_heads=3,
        num_kv_heads=1,
        head_size=32,
        block_size=16,
        dtype=dtype,
    )


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(1, torch.float32), (33, torch.float16), (80, torch.float32), (4096, torch.float16)],
)
def test_a_window_is_that_of_the_twin(window: int, dtype: torch.dtype) -> None:
    batch, options = ragged(dtype), AttentionOptions(window=window)
    assert_near_twin(attend(batch, options, num_decodes=2), expected(batch, options))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("lookahead", [1, 40, 4096])
def test_a_lookahead_is_that_of_the_twin(lookahead: int, window: int | None) -> None:
    batch = paged_batch(
        [(1, 1), (SPLIT_TOKENS + 70, SPLIT_TOKENS + 70), (40, 40)],
        num_heads=3,
        num_kv_heads=1,
        head_size=32,
        block_size=16,
    )
    options = AttentionOptions(window=window, lookahead=lookahead)
    assert_near_twin(attend(batch, options, num_decodes=1), expected(batch, options))


def test_a_token_in_a_window_has_the_same_bits_in_any_chunk() -> None:
    batch, options = ragged(torch.float32), AttentionOptions(window=21, soft_cap=5.0)
    whole = attend(batch, options, num_decodes=0)
    start = batch.query_starts[2]
    for first, end in [(0, 1), (0, 25), (25, 40), (39, 40)]:
        chunk = attend(batch.cut(2, first, end), options, num_decodes=0)
        assert torch.equal(chunk, whole[start + first : start + end]), (first, end)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_soft_cap_is_that_of_the_twin(dtype: torch.dtype) -> None:
    batch, options = ragged(dtype), AttentionOptions(soft_cap=0.7)
    assert_near_twin(attend(batch, options, num_decodes=2), expected(batch, options))


def test_a_float8_cache_is_read_as_the_twin_reads_it() -> None:
    batch, options = ragged(torch.float16), AttentionOptions(k_scale=0.02, v_scale=0.5)
    batch = replace(
        batch,
        k_cache=(batch.k_cache.float() / options.k_scale).clamp(-448, 448).to(FP8),
        v_cache=(batch.v_cache.float() / options.v_scale).clamp(-448, 448).to(FP8),
    )
    assert_near_twin(attend(batch, options, num_decodes=2), expected(batch, options))


def every_size() -> Tensor:
    """All float16 numbers, which hold all values and all ties of float8; finer ones; infinities."""
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    halves = halves[~halves.isnan()].float()
    fine = torch.randn(640, generator=torch.Generator().manual_seed(0)) * 0.01
    values = torch.cat([halves, fine])
    return values[: len(values) // 256 * 256].view(4, -1, 64)


def test_values_are_stored_in_float8_as_torch_rounds_them() -> None:
    values = every_size()
    caches = torch.zeros(4, 4, 4, values.shape[1], 64).to(FP8).unbind()
    slots = torch.tensor([7, 0, 15, 3])
    options = AttentionOptions(k_scale=0.25, v_scale=4.0)
    TRITON.write_kv(values, values, caches[0], caches[1], slots, options=options)
    twins.write_kv(values, values, caches[2], caches[3], slots, options=options)
    for got, want in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_rotating_and_writing_float8_is_its_twin() -> None:
    qkv = torch.randn(5, 10, 64, generator=torch.Generator().manual_seed(0))
    angles = torch.linspace(0, 9, 160).view(5, 32)
    caches = torch.zeros(4, 4, 8, 2, 64).to(FP8).unbind()
    slots = torch.tensor([31, 0, 9, 8, 17])
    options = AttentionOptions(k_scale=0.01, v_scale=0.3)
    arguments = (qkv, angles.cos(), angles.sin())
    got = TRITON.rotate_and_write_kv(*arguments, caches[0], caches[1], slots, options=options)
    want = twins.rotate_and_write_kv(*arguments, caches[2], caches[3], slots, options=options)
    assert torch.equal(got, want)
    for mine, its in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


@pytest.mark.parametrize(
    "values", [{"window": 0}, {"soft_cap": -1.0}, {"k_scale": 0.0}, {"v_scale": float("inf")}]
)
def test_an_option_out_of_range_is_refused_by_name(values: dict[str, float]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=f"{name}={values[name]}"):
        AttentionOptions(**values)  # type: ignore[arg-type]


def test_a_cache_of_another_8_bit_type_is_refused() -> None:
    cache = torch.zeros(2, 4, 1, 16).to(torch.float8_e5m2)
    k = torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match=r"float8_e5m2: .*float8_e4m3fn"):
        TRITON.write_kv(k, k, cache, cache, torch.zeros(1, dtype=torch.int64))
