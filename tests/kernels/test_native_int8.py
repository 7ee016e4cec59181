"""Int8 linear layers have the bits of their twin on every instruction set."""

import ctypes

import pytest
import torch
from tests.kernels.linear_layers import SENTINEL, assert_ranks_add_up, run_into
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native.backend import NativeBackend
from quire.kernels.native.int8 import Int8Linear
from quire.kernels.native.linear import Arena
from quire.kernels.reference import layers as reference
from quire.kernels.torch.cpu import CpuBackend
from quire.kernels.torch.linear import PlainGatedLinear, PlainInt8Linear, PlainLinear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (31, 64), (33, 10), (96, 130), (50, 7)]
ROWS = [1, 2, 3, 5, 12, 13, 97]


@pytest.fixture
def backend(library: ctypes.CDLL) -> NativeBackend:
    return NativeBackend(library, quantization="int8")


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_has_the_bits_of_the_twin(
    backend: NativeBackend, dtype: torch.dtype, has_bias: bool
) -> None:
    for num_out, num_in in SHAPES:
        weight = _random(num_out, num_in, dtype=dtype)
        bias = _random(num_out, dtype=dtype, seed=1) if has_bias else None
        linear, twin = backend.pack_linear(weight, bias), PlainInt8Linear.of(weight, bias)
        assert isinstance(linear, Int8Linear)
        for rows in ROWS:
            x = _random(rows, num_in, dtype=dtype, seed=rows)
            assert torch.equal(linear(x), twin(x)), (num_out, num_in, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_layer_is_that_of_the_twin(backend: NativeBackend, dtype: torch.dtype) -> None:
    for mlp_size, num_in in [(1, 2), (16, 8), (50, 72)]:
        weight = _random(2 * mlp_size, num_in, dtype=dtype)
        bias = _random(2 * mlp_size, dtype=dtype, seed=1)
        x = 3 * _random(30, num_in, dtype=dtype, seed=2)
        linear, twin = (b.pack_gated_linear(weight, bias) for b in (backend, _plain()))
        assert isinstance(linear, Int8Linear)
        assert isinstance(twin, PlainGatedLinear)
        # The silu's own rounding, and one more where that is rounded to bfloat16.
        rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(linear(x), twin(x), atol=1e-6, rtol=rounding)


def test_the_result_is_as_near_as_8_bits_can_be(backend: NativeBackend) -> None:
    weight, x = _random(80, 512), _random(20, 512, seed=1)
    exact = PlainLinear(weight)(x)
    error = (backend.pack_linear(weight)(x) - exact).square().mean().sqrt() / exact.std()
    # Both factors have a uniform error of up to half of a 127th of the row's maximum, about 3.
    assert error < 1.1 * (2**0.5) * (3.2 / 127) / 12**0.5


def test_the_largest_sums_and_outliers_are_exact(backend: NativeBackend) -> None:
    weight, x = torch.ones(40, 4096), torch.ones(3, 4096)
    weight[1::2] *= -1
    x[1] *= -1
    linear = backend.pack_linear(weight)
    torch.testing.assert_close(linear(x), x @ weight.T, atol=0, rtol=1e-6)
    x[2, 1:] = 0
    x[2, 0] = 1e30
    torch.testing.assert_close(linear(x)[2], x[2] @ weight.T, atol=0, rtol=1e-6)


def test_zeros_and_values_too_small_to_divide_by_are_zeros(backend: NativeBackend) -> None:
    weight = _random(33, 12)
    weight[3] = 0
    weight[4] = 1e-38
    x = _random(4, 12)
    x[1] = 0
    x[2] = 1e-40
    out = backend.pack_linear(weight)(x)
    assert torch.equal(out, PlainInt8Linear.of(weight)(x))
    assert (out[[1, 2]] == 0).all()
    assert (out[:, 3:5] == 0).all()
    assert (out[0, :3] != 0).all()


@pytest.mark.quick_cells(8)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    library: ctypes.CDLL, num_parts: int, gated: bool
) -> None:
    weight = _random(132, 92, dtype=torch.bfloat16)
    linear = Int8Linear(library, Arena(library), weight, None, num_parts=num_parts, gated=gated)
    x = _random(301, 92, dtype=torch.bfloat16, seed=1)
    whole = linear(x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in ROWS:
                assert torch.equal(linear(x[:rows]), whole[:rows]), (threads, rows)
                assert torch.equal(linear(x[-rows:]), whole[-rows:]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_the_input_add_up_to_the_bits_of_one(
    library: ctypes.CDLL, num_ranks: int
) -> None:
    weight, x = _random(50, 36), _random(7, 36, seed=1)
    whole = run_into(Int8Linear, library, x, weight, num_parts=4, mode=native_abi.STORE_F32)
    assert torch.equal(whole, reference.int8_linear(x, *reference.quantize(weight, num_parts=4)))
    shares = list(zip(x.chunk(num_ranks, 1), weight.chunk(num_ranks, 1), strict=True))
    assert_ranks_add_up(Int8Linear, library, shares, whole, num_parts=4)


@pytest.mark.quick_cells(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("num_out", [2, 30, 34, 64])
def test_nothing_is_written_beside_the_result(
    library: ctypes.CDLL, num_out: int, mode: int, dtype: torch.dtype
) -> None:
    weight, x = _random(num_out, 10, dtype=dtype), _random(14, 10, dtype=dtype, seed=1)
    width = num_out // 2 if mode == native_abi.GATED else num_out
    out = run_into(Int8Linear, library, x, weight, mode=mode, margin=3)
    assert (out[:, width:] == SENTINEL).all()
    assert (out[-3:] == SENTINEL).all()
    twin = PlainInt8Linear.of(weight)
    expected = twin(x)
    if mode == native_abi.GATED:
        expected = PlainGatedLinear(twin)(x)
    elif mode == native_abi.ADD:
        expected = expected + SENTINEL
    elif mode == native_abi.STORE_F32:
        expected = reference.int8_linear(x, twin.weight_OPI, twin.scale_OP)
    torch.testing.assert_close(out[:-3, :width], expected, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("num_in", [1, 4, 30, 33])
def test_quantised_rows_are_the_twins_and_end_where_they_should(
    library: ctypes.CDLL, num_in: int
) -> None:
    x = _random(5, 2 * num_in, dtype=torch.bfloat16)
    part = -(-num_in // 4) * 4
    out = torch.full((6, 2 * part + 1), 99, dtype=torch.uint8)
    scales = torch.full((6, 2), SENTINEL)
    arguments = native_abi.QuantizeArgs(
        dtype=native_abi.DTYPES[x.dtype],
        splits=2,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        num_in=2 * num_in,
        num_rows=5,
        out=out.data_ptr(),
        out_stride=out.stride(0),
        scales=scales.data_ptr(),
    )
    library.quire_quantize(ctypes.byref(arguments), 2)
    assert (out[5] == 99).all()
    assert (out[:, -1] == 99).all()
    assert (scales[5] == SENTINEL).all()
    values, expected_scales = reference.quantize(x, num_parts=2)
    assert torch.equal(scales[:5], expected_scales)
    stored = out[:5, :-1].reshape(5, 2, part)[:, :, :num_in]
    difference = (stored.int() - values.int()) % 256
    assert set(difference.flatten().tolist()) in ({0}, {128}), "an offset, the same for all"


def test_what_cannot_be_packed_stays_with_pytorch(backend: NativeBackend) -> None:
    weight, x = _random(6, 8).half(), _random(3, 8).half()
    linear = backend.pack_linear(weight, num_parts=2)
    assert isinstance(linear, PlainInt8Linear)
    torch.testing.assert_close(linear(x), x @ weight.T, atol=0.2, rtol=0.05)
    assert isinstance(backend.pack_gated_linear(weight), PlainGatedLinear)
    long = backend.pack_linear(torch.ones(1, 130_001))
    assert isinstance(long, PlainInt8Linear)
    torch.testing.assert_close(long(torch.ones(1, 130_001)).item(), 130_001.0)


def test_a_packed_layer_needs_no_original_and_takes_views(backend: NativeBackend) -> None:
    weight, wide = _random(20, 9)[:, :8], _random(5, 11)
    linear, twin = backend.pack_linear(weight), PlainInt8Linear.of(weight)
    expected = twin(wide[:, 1:9])
    weight.zero_()
    assert torch.equal(linear(wide[:, 1:9]), expected)
    assert linear(wide[:0, :8]).shape == (0, 20)


def _plain() -> CpuBackend:
    return CpuBackend(quantization="int8")
