"""Linear layers with 4-bit weights against their twin, on every instruction set."""

import ctypes

import pytest
import torch
from tests.kernels.linear_layers import SENTINEL, assert_ranks_add_up, run_into
from torch import Tensor

from quire.kernels.grouped import GroupedWeight, round_to_groups
from quire.kernels.native import abi as native_abi
from quire.kernels.native.backend import NativeBackend
from quire.kernels.native.int8 import Int8Linear
from quire.kernels.native.linear import Arena, PackedLinear
from quire.kernels.reference import layers as reference
from quire.kernels.reference import paged as twins
from quire.kernels.torch.cpu import CpuBackend
from quire.kernels.torch.linear import PlainGatedLinear, PlainLinear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 8, 8), (31, 64, 32), (33, 48, 16), (96, 640, 128), (50, 72, 24)]
"""Numbers of outputs, inputs, and inputs per group."""
ROWS = [1, 2, 3, 5, 12, 13, 97]


@pytest.fixture
def backend(library: ctypes.CDLL) -> NativeBackend:
    return NativeBackend(library)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(
    num_out: int,
    num_in: int,
    group: int,
    *,
    has_zeros: bool = False,
    wide_scales: bool = False,
    dtype: torch.dtype = torch.float32,
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(3)
    scale_OG = 0.1 + torch.rand(num_out, num_in // group, generator=generator)
    zero_OG = torch.randint(0, 17, scale_OG.shape, generator=generator, dtype=torch.uint8)
    return GroupedWeight(
        code_OI=torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8),
        scale_OG=scale_OG if wide_scales else scale_OG.bfloat16().float(),
        zero_OG=zero_OG if has_zeros else None,
        dtype=dtype,
    )


def _close(actual: Tensor, expected: Tensor) -> None:
    """Asserts equality up to a rounding or two, and float32 errors of terms of some hundred."""
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2**-7}[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=2e-3, rtol=rounding)


@pytest.mark.quick_cells(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide_scales", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_is_that_of_the_twin(
    backend: NativeBackend, dtype: torch.dtype, has_zeros: bool, wide_scales: bool, has_bias: bool
) -> None:
    for num_out, num_in, group in SHAPES:
        weight = _weight(
            num_out, num_in, group, has_zeros=has_zeros, wide_scales=wide_scales, dtype=dtype
        )
        bias = _random(num_out, dtype=dtype, seed=1) if has_bias else None
        linear = backend.pack_linear(weight, bias)
        assert isinstance(linear, PackedLinear)
        assert linear.weights.group == group
        assert linear.is_finite
        for rows in ROWS:
            x = _random(rows, num_in, dtype=dtype, seed=rows)
            expected = twins.grouped_linear(x, weight)
            _close(linear(x), expected if bias is None else expected + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_layer_is_that_of_the_twin(backend: NativeBackend, dtype: torch.dtype) -> None:
    for mlp_size, num_in in [(1, 8), (16, 16), (50, 72)]:
        weight = _weight(2 * mlp_size, num_in, 8, dtype=dtype)
        x = 0.3 * _random(30, num_in, dtype=dtype, seed=2)
        linear = backend.pack_gated_linear(weight)
        assert isinstance(linear, PackedLinear)
        exact = reference.silu_and_mul(twins.grouped_linear(x, weight).to(dtype))
        torch.testing.assert_close(linear(x), exact, atol=1e-2, rtol=2**-6)


@pytest.mark.quick_cells(24)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    library: ctypes.CDLL, num_parts: int, gated: bool, has_zeros: bool, dtype: torch.dtype
) -> None:
    weight = _weight(132, 7 * 32, 8, has_zeros=has_zeros, dtype=dtype)
    linear = PackedLinear(library, Arena(library), weight, None, num_parts=num_parts, gated=gated)
    x = _random(301, 7 * 32, dtype=dtype, seed=1)
    whole = linear(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert torch.equal(linear(x[:rows]), whole[:rows]), (threads, rows)
                assert torch.equal(linear(x[-rows:]), whole[-rows:]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("group", [8, 16, 64])
def test_ranks_that_share_the_input_add_up_to_the_bits_of_one(
    library: ctypes.CDLL, num_ranks: int, group: int
) -> None:
    """Parts of 16 inputs split groups of 64."""
    weight, x = _weight(50, 64, group, has_zeros=True), _random(7, 64, seed=1)
    whole = run_into(PackedLinear, library, x, weight, num_parts=4, mode=native_abi.STORE_F32)
    _close(whole, twins.grouped_linear(x, weight))
    size = 64 // num_ranks
    shares = [
        (x[:, begin : begin + size], _columns(weight, begin, begin + size))
        for begin in range(0, 64, size)
    ]
    assert_ranks_add_up(PackedLinear, library, shares, whole, num_parts=4)


def _columns(weight: GroupedWeight, first: int, last: int) -> GroupedWeight:
    fine = weight.regrouped(last - first)
    groups = slice(first // fine.group, last // fine.group)
    assert fine.zero_OG is not None
    return GroupedWeight(
        code_OI=fine.code_OI[:, first:last],
        scale_OG=fine.scale_OG[:, groups],
        zero_OG=fine.zero_OG[:, groups],
        dtype=fine.dtype,
    )


@pytest.mark.quick_cells(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("num_out", [2, 30, 34, 64])
def test_nothing_is_written_beside_the_result(
    library: ctypes.CDLL, num_out: int, mode: int, dtype: torch.dtype
) -> None:
    weight, x = _weight(num_out, 24, 8, dtype=dtype), 0.3 * _random(14, 24, dtype=dtype, seed=1)
    width = num_out // 2 if mode == native_abi.GATED else num_out
    out = run_into(PackedLinear, library, x, weight, mode=mode, margin=3)
    assert (out[:, width:] == SENTINEL).all()
    assert (out[-3:] == SENTINEL).all()
    expected = twins.grouped_linear(x, weight)
    if mode == native_abi.GATED:
        expected = reference.silu_and_mul(expected.to(dtype))
    elif mode == native_abi.ADD:
        expected = expected.to(dtype) + SENTINEL
    torch.testing.assert_close(out[:-3, :width], expected.to(out.dtype), atol=1e-2, rtol=2**-6)


def test_what_cannot_be_packed_in_groups_is_decoded(backend: NativeBackend) -> None:
    weight, x = _weight(6, 24, 8), _random(3, 24)
    cut = backend.pack_linear(weight, num_parts=2)  # 12 inputs in a part
    assert isinstance(cut, PackedLinear)
    assert cut.weights.group == 0
    _close(cut(x), twins.grouped_linear(x, weight))
    half = _weight(6, 24, 8, dtype=torch.float16)
    assert isinstance(backend.pack_linear(half), PlainLinear)
    assert isinstance(CpuBackend().pack_gated_linear(weight), PlainGatedLinear)
    torch.testing.assert_close(
        CpuBackend().pack_linear(weight)(x), twins.grouped_linear(x, weight), atol=1e-3, rtol=0
    )


def test_scales_that_are_not_finite_are_noticed(backend: NativeBackend) -> None:
    weight = _weight(6, 24, 8)
    weight.scale_OG[3, 1] = float("nan")
    linear = backend.pack_linear(weight)
    assert isinstance(linear, PackedLinear)
    assert not linear.is_finite


def test_rounding_is_as_near_as_4_bits_can_be() -> None:
    weight = _random(80, 512)
    rounded = round_to_groups(weight)
    assert rounded is not None
    assert rounded.group == 32
    assert torch.equal(rounded.scale_OG, rounded.scale_OG.bfloat16().float())
    error = (rounded.decode() - weight).square().mean().sqrt()
    # Uniformly wrong by up to half of an eighth of a group's extreme, which is about 2.42;
    # less for the search.
    assert error < 0.97 * (2.42 / 8) / 12**0.5


def test_a_group_is_rounded_the_same_in_any_matrix() -> None:
    weight = _random(300, 1024).bfloat16()
    whole = round_to_groups(weight, num_parts=4)
    part = round_to_groups(weight[7:9, 256:512])
    assert whole is not None
    assert part is not None
    assert torch.equal(part.code_OI, whole.code_OI[7:9, 256:512])
    assert torch.equal(part.scale_OG, whole.scale_OG[7:9, 8:16])


def test_zeros_and_broken_values_and_odd_sizes_are_rounded_to_something() -> None:
    weight = _random(4, 64)
    weight[0] = 0
    weight[1, :32] = 1e-38
    weight[2, 40] = float("nan")
    weight[3, 3] = float("inf")
    rounded = round_to_groups(weight)
    assert rounded is not None
    decoded = rounded.decode()
    assert (decoded[0] == 0).all()
    assert (decoded[1, :32] == 0).all()
    is_broken = ~rounded.scale_OG.isfinite()
    assert is_broken.tolist() == [[False] * 2, [False] * 2, [False, True], [True, False]]
    assert round_to_groups(_random(4, 60)) is None
    small = round_to_groups(_random(4, 48), num_parts=2)
    assert small is not None
    assert small.group == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_in_w4_rounds_layers_and_has_its_lm_head_in_int8(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    backend, weight = NativeBackend(library, quantization="w4"), _random(40, 96, dtype=dtype)
    x = _random(3, 96, dtype=dtype, seed=1)
    for linear in (backend.pack_linear(weight), backend.pack_gated_linear(weight)):
        assert isinstance(linear, PackedLinear)
        assert linear.weights.group == 32
    assert isinstance(backend.pack_linear(weight, is_lm_head=True), Int8Linear)
    rounded = round_to_groups(weight)
    assert rounded is not None
    _close(backend.pack_linear(weight)(x), twins.grouped_linear(x, rounded))
    plain = CpuBackend(quantization="w4").pack_linear(weight)(x)
    torch.testing.assert_close(plain, backend.pack_linear(weight)(x), atol=0.1, rtol=0.02)
    broken = weight.clone()
    broken[3, 3] = float("nan")
    layer = backend.pack_linear(broken)
    assert isinstance(layer, PackedLinear)
    assert not layer.is_finite
