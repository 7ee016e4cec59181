"""The CPU backend against its twin, and its batch invariance: no row changes another's bits."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tools.kernels.testing import assert_near_twin, paged_batch

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import backend_for
from quire.kernels.reference import layers as reference
from quire.kernels.reference import paged as twins
from quire.kernels.torch.cpu import TILE, CpuBackend

CPU = CpuBackend()
RAGGED = [(1, 1), (300, 1), (TILE, 1), (TILE + 1, 1), (5, 5), (2 * TILE, 70), (333, 333)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_a_cpu_gets_the_cpu_backend() -> None:
    assert backend_for(torch.device("cpu")).name in ("cpu", "cpu-native")


def test_a_gpu_refuses_to_quantise_by_name() -> None:
    with pytest.raises(ValueError, match="quantization='int8': kernels exist for 'cpu' only"):
        backend_for(torch.device("cuda"), quantization="int8")


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'meta'.*'cpu' and 'cuda'"):
        backend_for(torch.device("meta"))


def test_a_gpu_without_triton_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"cuda needs Triton.*pip install 'triton>=3\.6'"):
        backend_for(torch.device("cuda"))


@pytest.mark.slow
def test_the_cpu_backend_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from quire.kernels.torch import cpu\n"
        "from quire.kernels.reference import layers as reference\n"
        "from quire.kernels.backend import backend_for\n"
        "assert backend_for(torch.device('cpu')).name in ('cpu', 'cpu-native')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(2, 2, 16), (6, 2, 64), (4, 1, 80), (1, 1, 32)]
)
def test_attention_is_that_of_the_twin(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, block_size: int
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    assert_near_twin(batch.attend(CPU, num_decodes=4), batch.expected())


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("block_size", [4, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_an_int8_cache_is_that_of_the_twin(
    dtype: torch.dtype, block_size: int
) -> None:
    for num_heads, num_kv_heads, head_size in [(6, 2, 64), (4, 1, 6)]:
        batch = paged_batch(
            RAGGED,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
        )
        expected = batch.stored_by(twins, int8=True).expected()
        assert_near_twin(batch.stored_by(CPU, int8=True).attend(CPU), expected)


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize("sinks", [None, (-2.0, 0.0, 1.0, 3.0, -30.0, 30.0)])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 60, TILE, 10_000])
def test_windows_caps_and_sinks_are_those_of_the_twin_in_any_chunk(
    window: int, cap: float | None, sinks: tuple[float, ...] | None
) -> None:
    options = AttentionOptions(window=window, soft_cap=cap, sinks=sinks)
    batch = paged_batch(RAGGED, num_heads=6, num_kv_heads=2, head_size=32, block_size=16)
    got = batch.attend(CPU, num_decodes=4, options=options)
    assert_near_twin(got, batch.expected(options=options))
    chunk = batch.cut(6, 100, 200).attend(CPU, options=options)
    start = batch.query_starts[6]
    assert torch.equal(chunk, got[start + 100 : start + 200])


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("lookahead", [1, 70, TILE, 10_000])
def test_a_lookahead_is_that_of_the_twin_in_any_batch(lookahead: int, window: int | None) -> None:
    options = AttentionOptions(window=window, lookahead=lookahead)
    batch = paged_batch(
        [(1, 1), (300, 300), (TILE, TILE), (40, 40)],
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        block_size=16,
    )
    got = batch.attend(CPU, num_decodes=1, options=options)
    assert_near_twin(got, batch.expected(options=options))
    assert torch.equal(batch.only(1).attend(CPU, options=options), got[1:301])


def test_a_model_with_sinks_has_a_backend_on_cpus_alone() -> None:
    sinks = AttentionOptions(sinks=(0.0,))
    cpu = torch.device("cpu")
    assert backend_for(cpu, options={sinks}).name == backend_for(cpu).name
    with pytest.raises(ValueError, match="sinks: kernels exist for 'cpu' only"):
        backend_for(torch.device("cuda"), options={sinks})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_norm_and_of_an_activation_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(37, 101).to(dtype) * 3, torch.randn(101), torch.randn(101)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        norms = [
            reference.wide_norm(x, weight, bias, eps=1e-5, is_centred=is_centred)
            for is_centred in (False, True)
        ]
        gated = [reference.gelu_and_mul(x[:, 1:]), reference.silu_and_mul(x[:, 1:])]
        return [*norms, reference.gelu(x), *gated]

    together = run(x)
    for first, last in ((0, 1), (1, 4), (5, 37)):
        for alone, all_rows in zip(run(x[first:last].clone()), together, strict=True):
            assert torch.equal(alone, all_rows[first:last])
    wide = x.float()
    theirs = [
        torch.nn.functional.rms_norm(wide, (101,), weight, 1e-5) + bias,
        torch.nn.functional.layer_norm(wide, (101,), weight, bias, 1e-5),
        torch.nn.functional.gelu(wide, approximate="tanh"),
        torch.nn.functional.gelu(wide[:, 1:51], approximate="tanh").to(dtype) * x[:, 51:],
        torch.nn.functional.silu(wide[:, 1:51]).to(dtype) * x[:, 51:],
    ]
    for ours, expected in zip(together, theirs, strict=True):
        torch.testing.assert_close(ours, expected.to(dtype))


def test_a_decode_of_length_0_gets_zeros() -> None:
    batch = paged_batch([(8, 1), (5, 1)], num_heads=2, num_kv_heads=1, head_size=16, block_size=4)
    empty = replace(batch, rows=[(0, 1), (5, 1)])
    out = empty.attend(CPU, num_decodes=2)
    assert (out[0] == 0).all()
    assert torch.equal(out[1], batch.attend(CPU, num_decodes=2)[1])


def test_bfloat16_loses_no_more_than_the_rounding_of_the_result() -> None:
    batch = paged_batch(
        [(700, 3)],
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        dtype=torch.bfloat16,
    )
    # Differences of float32 sums hardly ever change the rounding to bfloat16.
    torch.testing.assert_close(batch.attend(CPU), batch.expected(), atol=1e-6, rtol=2**-7)
    assert (batch.attend(CPU) == batch.expected()).float().mean() > 0.99


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (8, 1)])
def test_a_row_has_the_same_bits_whoever_shares_the_batch(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(
        RAGGED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=64,
        block_size=16,
        dtype=dtype,
    )
    together = batch.attend(CPU, num_decodes=4)
    for row, (_, queries) in enumerate(batch.rows):
        start = batch.query_starts[row]
        assert torch.equal(batch.only(row).attend(CPU), together[start : start + queries]), row


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size"), [(6, 2, 64), (3, 3, 32), (2, 1, 128)]
)
def test_a_token_has_the_same_bits_in_any_chunk_and_as_a_decode(
    num_heads: int, num_kv_heads: int, head_size: int
) -> None:
    batch = paged_batch(
        [(400, 390)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=16,
    )
    whole = batch.attend(CPU)
    for cuts in ([0, 7, 118, 119, 246, 247, 390], [0, 389, 390], [0, 128, 256, 384, 390]):
        for first, end in itertools.pairwise(cuts):
            assert torch.equal(batch.cut(0, first, end).attend(CPU), whole[first:end]), (first, end)
    for token in range(0, 390, 31):
        assert torch.equal(batch.cut(0, token, token + 1).attend(CPU), whole[token : token + 1])


def test_a_step_without_rows_and_a_row_without_queries_are_fine() -> None:
    for rows in ([], [(0, 0), (9, 2), (5, 0)]):
        batch = paged_batch(rows, num_heads=4, num_kv_heads=2, head_size=16, block_size=4)
        torch.testing.assert_close(batch.attend(CPU), batch.expected())


def test_queries_may_be_views_into_a_fused_projection() -> None:
    batch = paged_batch([(40, 3)], num_heads=6, num_kv_heads=2, head_size=16, block_size=4)
    fused = torch.randn(3, 10, 16)
    fused[:, :6] = batch.q
    want = batch.attend(CPU)
    assert torch.equal(replace(batch, q=fused[:, :6]).attend(CPU), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_touches_the_slots_it_is_given_and_no_other(dtype: torch.dtype) -> None:
    fused = torch.randn(5, 7, 8).to(dtype)
    k, v = fused[:, 3:5], fused[:, 5:]
    k_cache = torch.full((4, 8, 2, 8), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    slots = torch.tensor([31, 0, 9, 8, 17])
    CPU.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    assert k_cache.isnan().all(dim=(2, 3)).sum() == 32 - 5
    assert v_cache.isnan().all(dim=(2, 3)).sum() == 32 - 5
