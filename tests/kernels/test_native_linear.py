"""Packed linear layers and the element-wise kernels, on every instruction set, against PyTorch."""

import ctypes

import pytest
import torch
from tests.kernels.linear_layers import SENTINEL, assert_ranks_add_up, run_into
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native import greedy
from quire.kernels.native.backend import NativeBackend
from quire.kernels.native.linear import Arena, PackedLinear
from quire.kernels.reference import layers as reference
from quire.kernels.torch.linear import PlainGatedLinear, PlainLinear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 2), (31, 64), (33, 10), (96, 130)]
ROWS = [1, 2, 3, 5, 12, 13, 97]


@pytest.fixture
def backend(library: ctypes.CDLL) -> NativeBackend:
    return NativeBackend(library)


def _close(actual: Tensor, expected: Tensor) -> None:
    """Asserts equality up to a rounding or two, and float32 errors of some hundred terms."""
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2**-7}[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=rounding)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.quick_cells(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_is_that_of_float64(
    backend: NativeBackend, num_out: int, num_in: int, dtype: torch.dtype, has_bias: bool
) -> None:
    weight = _random(num_out, num_in, dtype=dtype)
    bias = _random(num_out, dtype=dtype, seed=1) if has_bias else None
    linear = backend.pack_linear(weight, bias)
    assert isinstance(linear, PackedLinear)
    for rows in ROWS:
        x = _random(rows, num_in, dtype=dtype, seed=rows)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        _close(linear(x), exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mlp_size", "num_in"), [(1, 2), (16, 8), (50, 72)])
def test_a_gated_layer_is_that_of_the_twin(
    backend: NativeBackend, mlp_size: int, num_in: int, dtype: torch.dtype
) -> None:
    weight = _random(2 * mlp_size, num_in, dtype=dtype)
    bias = _random(2 * mlp_size, dtype=dtype, seed=1)
    x = 3 * _random(30, num_in, dtype=dtype, seed=2)
    linear = backend.pack_gated_linear(weight, bias)
    assert isinstance(linear, PackedLinear)
    expected = PlainGatedLinear(PlainLinear(weight, bias))(x)
    # A gate or an up that rounds the other way moves the product by one more rounding each.
    rounding = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8}[dtype]
    torch.testing.assert_close(linear(x), expected, atol=1e-4, rtol=rounding)


def test_silu_is_right_at_its_extremes(backend: NativeBackend) -> None:
    gates = torch.tensor([0.0, -0.0, 1e-30, -20, 20, -80, -90, 90, -1e3, 1e4, 3e38])
    weight = torch.eye(2 * len(gates))
    x = torch.cat([gates, torch.ones(len(gates))])[None]
    expected = torch.nn.functional.silu(gates)[None]
    actual = backend.pack_gated_linear(weight)(x)
    torch.testing.assert_close(actual, expected, atol=1e-34, rtol=3e-6)


@pytest.mark.quick_cells(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    library: ctypes.CDLL, num_parts: int, gated: bool, dtype: torch.dtype
) -> None:
    weight = _random(132, 96, dtype=dtype)
    linear = PackedLinear(library, Arena(library), weight, None, num_parts=num_parts, gated=gated)
    x = _random(301, 96, dtype=dtype, seed=1)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_the_input_add_up_to_the_bits_of_one(
    library: ctypes.CDLL, num_ranks: int, dtype: torch.dtype
) -> None:
    weight, x = _random(50, 96, dtype=dtype), _random(7, 96, dtype=dtype, seed=1)
    whole = run_into(PackedLinear, library, x, weight, num_parts=4, mode=native_abi.STORE_F32)
    shares = list(zip(x.chunk(num_ranks, 1), weight.chunk(num_ranks, 1), strict=True))
    assert_ranks_add_up(PackedLinear, library, shares, whole, num_parts=4)


@pytest.mark.quick_cells(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("num_out", [2, 30, 34, 64])
def test_nothing_is_written_beside_the_result(
    library: ctypes.CDLL, num_out: int, mode: int, dtype: torch.dtype
) -> None:
    weight, x = _random(num_out, 10, dtype=dtype), _random(14, 10, dtype=dtype, seed=1)
    width = num_out // 2 if mode == native_abi.GATED else num_out
    out = run_into(PackedLinear, library, x, weight, mode=mode, margin=3)
    assert (out[:, width:] == SENTINEL).all()
    assert (out[-3:] == SENTINEL).all()
    inside = out[:-3, :width]
    plain = PlainLinear(weight)(x)
    if mode == native_abi.GATED:
        plain = PlainGatedLinear(PlainLinear(weight))(x)
    elif mode == native_abi.ADD:
        plain = plain + SENTINEL
    expected = x.float() @ weight.float().T if mode == native_abi.STORE_F32 else plain
    torch.testing.assert_close(inside.float(), expected.float(), atol=0.05, rtol=2**-6)


def test_what_cannot_be_packed_stays_with_pytorch(backend: NativeBackend) -> None:
    for weight in (torch.randn(4, 6).half(), torch.randn(4, 7).bfloat16()):
        assert isinstance(backend.pack_linear(weight), PlainLinear)
        assert isinstance(backend.pack_gated_linear(weight), PlainGatedLinear)


def test_layers_and_inputs_of_the_wrong_shape_or_type_are_refused(library: ctypes.CDLL) -> None:
    weight, backend = torch.zeros(6, 8), NativeBackend(library)
    for message, rows, bias, num_parts, gated in [
        ("bias: .*bfloat16", 6, torch.zeros(6).bfloat16(), 1, False),
        ("bias: ", 6, torch.zeros(5), 1, False),
        ("num_parts=3: must be 1, 2, 4 or 8", 6, None, 3, False),
        ("weight of 5 rows: a gated layer", 5, None, 1, True),
    ]:
        wide = torch.zeros(rows, 24)
        with pytest.raises(ValueError, match=message):
            PackedLinear(library, Arena(library), wide, bias, num_parts=num_parts, gated=gated)
    linear = backend.pack_linear(weight)
    for x in (torch.zeros(2, 7), torch.zeros(2, 8).bfloat16(), torch.zeros(8)):
        with pytest.raises(ValueError, match=r"input: .*; must be torch.float32 of 8 columns"):
            linear(x)
    with pytest.raises(ValueError, match="a norm's weight"):
        backend.rms_norm(torch.zeros(2, 8), torch.zeros(7), eps=1e-5)
    heads, angles = torch.zeros(3, 2, 8), torch.zeros(3, 4)
    for message, x, cos, sin in [
        ("cos: ", heads, angles[:2], angles),
        ("sin: ", heads, angles, angles.double()),
        ("8 channels to rotate: a head has 6", heads[..., :6], angles, angles),
    ]:
        with pytest.raises(ValueError, match=message):
            backend.rotary_embedding(x, cos, sin)


def test_a_packed_layer_needs_no_original_and_takes_views(backend: NativeBackend) -> None:
    weight, wide = torch.randn(20, 9, dtype=torch.float64).float()[:, :8], torch.randn(5, 11)
    linear = backend.pack_linear(weight)
    expected = wide[:, 1:9] @ weight.T
    weight.zero_()
    torch.testing.assert_close(linear(wide[:, 1:9]), expected)
    assert linear(wide[:0, :8]).shape == (0, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_channels", [2, 72, 288])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_is_that_of_the_twin(
    backend: NativeBackend, num_channels: int, dtype: torch.dtype, has_residual: bool
) -> None:
    x, weight = _random(5, num_channels, dtype=dtype), _random(num_channels, dtype=dtype, seed=1)
    residual = _random(5, num_channels, dtype=dtype, seed=2) if has_residual else None
    normed, total = backend.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    twin, twin_total = reference.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    _close(normed, twin)
    assert torch.equal(total, twin_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "half"), [(2, 1), (16, 8), (64, 32), (80, 40), (64, 12)])
def test_rotary_embedding_is_that_of_the_twin(
    backend: NativeBackend, head_size: int, half: int, dtype: torch.dtype
) -> None:
    fused = _random(6, 5, head_size, dtype=dtype)
    angles = torch.randn(6, half)
    got = backend.rotary_embedding(fused[:, 1:4], angles.cos(), angles.sin())
    _close(got, reference.rotary_embedding(fused[:, 1:4], angles.cos(), angles.sin()))


@pytest.mark.parametrize("size", [1, 15, 64, 331])
def test_argmax_is_the_first_of_the_greatest(
    library: ctypes.CDLL, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "library", lambda: library)
    x = torch.randint(-3, 3, (40, size), generator=torch.Generator().manual_seed(0)).float()
    x[7] = float("-inf")
    assert greedy.argmax(x).tolist() == [row.index(max(row)) for row in x.tolist()]
    assert greedy.argmax(x[:0]).shape == (0,)
    assert greedy.argmax(x.double().t()).tolist() == x.t().argmax(-1).tolist()
