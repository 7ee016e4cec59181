"""LoRA adapters: each token's rows get its own adapter's products, and nothing else changes."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.kernels.low_rank_model import (
    ADAPTERS,
    DTYPES,
    LAYERS,
    Adapter,
    C,
    layers_of,
    make_batch,
    make_kv,
    make_program,
    make_weights,
    merged,
)
from torch import Tensor

from quire.kernels.loop import Loop
from quire.kernels.native.backend import NativeBackend
from quire.kernels.native.program import NativeProgram
from quire.kernels.ops import (
    AllReduce,
    Embed,
    Linear,
    LowRank,
    MixExperts,
    Op,
    Program,
    ProgramRunner,
)
from quire.kernels.quantization import Quantization
from quire.kernels.torch.cpu import CpuBackend
from quire.kernels.torch.linear import PlainLinear
from quire.kernels.torch.low_rank import PlainLowRank, StepAdapters, multiply


def _same(x: Tensor) -> Tensor:
    return x


def _open(runner: ProgramRunner, slots: dict[int, Adapter], dtype: torch.dtype, **of: int) -> None:
    assert runner.adapters is not None
    runner.adapters.open(num_slots=9, max_rank=256)
    for slot, adapter in slots.items():
        runner.adapters.set(slot, layers_of(adapter, dtype, **of))


def _run(
    runner: ProgramRunner, dtype: torch.dtype, prompts: Sequence[int], slots: Sequence[int] | None
) -> list[Tensor]:
    """Logits of all tokens, by row."""
    batch = make_batch(prompts, slots)
    logits = runner.forward(batch, make_kv(dtype), all_reduce=_same)
    return list(torch.split(logits, batch.seq_lens_B.tolist()))


def _native(
    library: ctypes.CDLL, dtype: torch.dtype, quantization: Quantization | None = None
) -> NativeProgram:
    backend = NativeBackend(library, quantization=quantization)
    runner = backend.prepare(make_program(backend, dtype, make_weights()))
    assert isinstance(runner, NativeProgram)
    return runner


def test_a_plain_layer_adds_the_product_of_float64() -> None:
    rng = torch.Generator().manual_seed(2)
    layer = PlainLinear(torch.randn(48, 40, generator=rng), torch.randn(48, generator=rng))
    program = (
        Embed(weight_VC=torch.zeros(1, 1), out="residual"),
        Linear(name="layers.0.up", layer=layer, x="normed", out="hidden"),
    )
    low_rank = PlainLowRank(program)
    low_rank.open(num_slots=3, max_rank=64)
    x = torch.randn(21, 40, generator=rng)
    slots = torch.randint(-1, 3, (21,), generator=rng).int()
    expected = torch.nn.functional.linear(x.double(), layer.weight_OI.double(), None)
    assert layer.bias_O is not None
    expected += layer.bias_O
    for slot in (0, 2):  # the middle one is empty
        parts = []
        for rank, first, height in ((1, 0, 7), (64, 5, 43), (3, 47, 1)):
            a = torch.randn(rank, 40, generator=rng)
            b = torch.randn(height, rank, generator=rng)
            parts.append(LowRank(a_RI=a, b_OR=b, first_row=first, scale=0.3 * rank))
            rows = slots == slot
            delta = 0.3 * rank * (x[rows].double() @ a.double().T) @ b.double().T
            expected[rows, first : first + height] += delta
        low_rank.set(slot, {"layers.0.up": tuple(parts)})
    found = multiply(layer, "layers.0.up", x, StepAdapters.of(low_rank, slots))
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-5)
    without = slots.eq(-1) | slots.eq(1)
    assert torch.equal(found[without], layer(x)[without])


@pytest.mark.parametrize("number", range(len(ADAPTERS)))
@pytest.mark.parametrize("kind", ["plain", "native", "loop over native"])
def test_an_adapter_is_a_model_with_its_product_in_the_weights(
    library: ctypes.CDLL, number: int, kind: str
) -> None:
    dtype, adapter = torch.float32, ADAPTERS[number]
    backend = CpuBackend() if kind == "plain" else NativeBackend(library)

    def make(program: Program) -> ProgramRunner:
        return backend.prepare(program) if kind == "native" else Loop(backend, program)

    runner = make(make_program(backend, dtype, make_weights()))
    _open(runner, {4: adapter}, dtype)
    model = make(make_program(backend, dtype, merged(make_weights(), adapter)))
    prompts = list(range(6))
    found = _run(runner, dtype, prompts, [4] * 6)
    for each, expected in zip(found, _run(model, dtype, prompts, None), strict=True):
        torch.testing.assert_close(each, expected, atol=2e-4, rtol=2e-4)
    plain = torch.cat(_run(runner, dtype, prompts, None))
    assert (torch.cat(found) - plain).abs().max() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [None, "int8", "w4"])
def test_native_logits_are_those_of_plain_pytorch(
    library: ctypes.CDLL, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    native = _native(library, dtype, quantization)
    plain = CpuBackend(quantization=quantization)
    loop = Loop(plain, make_program(plain, dtype, make_weights()))
    for runner in (native, loop):
        _open(runner, dict(enumerate(ADAPTERS)), dtype)
    prompts, slots = list(range(8)), [0, 1, 2, 3, 4, -1, 0, 7]
    found = torch.cat(_run(native, dtype, prompts, slots))
    expected = torch.cat(_run(loop, dtype, prompts, slots))
    assert not torch.allclose(expected, torch.cat(_run(loop, dtype, prompts, None)), atol=0.05)
    tolerance = 2e-4 if dtype == torch.float32 and quantization != "int8" else 0.2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "native", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_has_the_same_bits_alone_and_beside_any_others(
    library: ctypes.CDLL, dtype: torch.dtype, kind: str, threads: int
) -> None:
    """In any slot, in any order, with any adapters in the other slots."""
    plain = CpuBackend()
    runner: ProgramRunner = (
        Loop(plain, make_program(plain, dtype, make_weights()))
        if kind == "plain"
        else _native(library, dtype, "int8" if kind == "int8" else None)
    )
    assert runner.adapters is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _open(runner, {}, dtype)
        without = [_run(runner, dtype, [prompt], None)[0] for prompt in range(8)]
        alone = []
        for prompt in range(8):
            runner.adapters.set(3, layers_of(ADAPTERS[prompt % 5], dtype))
            alone.append(_run(runner, dtype, [prompt], [3])[0])
        assert not any(torch.equal(x, y) for x, y in zip(without, alone, strict=True))
        runner.adapters.set(3, None)
        for shift in (0, 2):
            for slot in range(5):
                runner.adapters.set((slot + shift) % 5, layers_of(ADAPTERS[slot], dtype))
            for prompts in ([0, 1, 2, 3, 4, 5, 6, 7], [6, 3, 0, 7, 2, 5, 1, 4], [4, 6]):
                slots = [(prompt % 5 + shift) % 5 for prompt in prompts]
                slots[1] = -1 if shift else 8  # No adapter, or an empty slot.
                rows = _run(runner, dtype, prompts, slots)
                for at, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
                    assert torch.equal(row, without[prompt] if at == 1 else alone[prompt])
    finally:
        torch.set_num_threads(before)


def test_a_prefill_of_many_tokens_has_the_bits_of_its_tokens_alone(library: ctypes.CDLL) -> None:
    """Prompts of more tokens than a work item has, with one adapter and with several."""
    dtype = torch.bfloat16
    runner = _native(library, dtype)
    _open(runner, dict(enumerate(ADAPTERS)), dtype)
    prompts = [5] * 8
    one, other = (_run(runner, dtype, [5], [slot])[0] for slot in (0, 1))
    assert all(torch.equal(row, one) for row in _run(runner, dtype, prompts, [0] * 8))
    mixed = _run(runner, dtype, prompts, [0, 1] * 4)
    for at, row in enumerate(mixed):
        assert torch.equal(row, other if at % 2 else one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_ranks_have_the_bits_of_one(
    library: ctypes.CDLL, dtype: torch.dtype, size: int, quantization: Quantization | None
) -> None:
    alone = _native(library, dtype, quantization)
    _open(alone, dict(enumerate(ADAPTERS)), dtype)
    prompts, slots = list(range(8)), [0, 1, 2, 3, 4, -1, 0, 7]
    for used in (slots, None, [3] * 8, slots):
        expected = torch.cat(_run(alone, dtype, prompts, used))
        for found in _run_ranks(library, dtype, size, quantization, prompts, used):
            assert torch.equal(found, expected)


def _run_ranks(
    library: ctypes.CDLL,
    dtype: torch.dtype,
    size: int,
    quantization: Quantization | None,
    prompts: Sequence[int],
    slots: Sequence[int] | None,
) -> list[Tensor]:
    """Each rank's logits; a thread is a rank."""
    barrier, shares, num_sums = threading.Barrier(size), [torch.empty(0)] * size, [0] * size
    results = [torch.empty(0)] * size

    def run(rank: int) -> None:
        def all_reduce(x: Tensor) -> Tensor:
            num_sums[rank] += 1
            shares[rank] = x.clone()
            barrier.wait()
            tree = list(shares)
            while len(tree) > 1:
                tree = [x + y for x, y in zip(tree[::2], tree[1::2], strict=True)]
            barrier.wait()
            return x.copy_(tree[0])

        torch.set_num_threads(1)
        backend = NativeBackend(library, quantization=quantization)
        runner = backend.prepare(make_program(backend, dtype, make_weights(), rank=rank, size=size))
        _open(runner, dict(enumerate(ADAPTERS)), dtype, rank=rank, size=size)
        results[rank] = runner.forward(
            make_batch(prompts, slots), make_kv(dtype, size=size), all_reduce=all_reduce
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_sums == [2 * LAYERS] * size  # as many as without adapters
    return results


def test_the_loop_sums_shares_of_ranks_with_those_of_their_layers(library: ctypes.CDLL) -> None:
    backend = CpuBackend()
    one, shared = (
        Loop(backend, _with_sums(make_program(backend, torch.float32, make_weights()), has_sums))
        for has_sums in (False, True)
    )
    for runner in (one, shared):
        _open(runner, dict(enumerate(ADAPTERS)), torch.float32)
    prompts, slots = list(range(8)), [0, 1, 2, 3, 4, -1, 0, 7]
    expected = torch.cat(_run(one, torch.float32, prompts, slots))
    found = torch.cat(_run(shared, torch.float32, prompts, slots))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def _with_sums(program: Program, has_sums: bool) -> Program:
    """The program with an all-reduce over one rank wherever several ranks would have one."""
    ops: list[Op] = []
    for op in program:
        ops.append(replace(op, is_split=has_sums) if isinstance(op, MixExperts) else op)
        if has_sums and isinstance(op, Linear) and op.out == "branch":
            ops.append(AllReduce(x="branch"))
    return tuple(ops)


def test_a_slot_can_be_changed_and_emptied(library: ctypes.CDLL) -> None:
    dtype = torch.bfloat16
    runner = _native(library, dtype)
    _open(runner, {0: ADAPTERS[0], 1: ADAPTERS[1]}, dtype)
    assert runner.adapters is not None
    first, second = _run(runner, dtype, [2, 2], [0, 1])
    (without,) = _run(runner, dtype, [2], None)
    runner.adapters.set(0, layers_of(ADAPTERS[1], dtype))
    runner.adapters.set(1, layers_of(ADAPTERS[0], dtype))
    assert all(map(torch.equal, _run(runner, dtype, [2, 2], [0, 1]), (second, first)))
    runner.adapters.set(0, None)
    assert all(map(torch.equal, _run(runner, dtype, [2, 2], [0, 1]), (without, first)))
    runner.adapters.set(1, {})
    assert all(map(torch.equal, _run(runner, dtype, [2, 2], [0, 1]), (without, without)))


@pytest.mark.parametrize("kind", ["plain", "native"])
def test_what_does_not_fit_is_refused_and_the_slot_stays_as_it_was(
    library: ctypes.CDLL, kind: str
) -> None:
    dtype, plain = torch.float32, CpuBackend()
    runner: ProgramRunner = (
        Loop(plain, make_program(plain, dtype, make_weights()))
        if kind == "plain"
        else _native(library, dtype)
    )
    assert runner.adapters is not None
    for num_slots, max_rank in ((0, 8), (4, 0), (4, 257)):
        with pytest.raises(ValueError, match=f"{num_slots=}, {max_rank=}"):
            runner.adapters.open(num_slots=num_slots, max_rank=max_rank)
    runner.adapters.open(num_slots=2, max_rank=8)
    good = LowRank(a_RI=torch.ones(8, C), b_OR=torch.ones(3, 8), first_row=1, scale=1.0)
    runner.adapters.set(1, {"layers.0.qkv": (good,)})
    (before,) = _run(runner, dtype, [2], [1])
    for slot, name, part, message in [
        (2, "layers.0.qkv", good, "adapter slot 2: must be below 2"),
        (-1, "layers.0.qkv", good, "adapter slot -1"),
        (1, "layers.9.qkv", good, r"layers\.9\.qkv: the model has no such layer"),
        (1, "lm_head", good, "lm_head: the model has no such layer"),
        (1, "layers.1.down", good, r"layers\.1\.down: the model has no"),
        (1, "layers.0.o", good, r"layers\.0\.o: an adapter's A of \(8, 80\) .* has 128 inputs"),
        (1, "layers.0.qkv", replace(good, first_row=254), "outputs from 254; .* 256 outputs"),
        (1, "layers.0.qkv", replace(good, first_row=-1), "outputs from -1"),
        (1, "layers.0.qkv", replace(good, b_OR=torch.ones(3, 7)), r"B of \(3, 7\)"),
        (1, "layers.0.qkv", replace(good, a_RI=torch.ones(9, C)), "rank 9; must be from 1 to 8"),
        (1, "layers.0.qkv", replace(good, a_RI=torch.ones(8, C).bfloat16()), "torch.bfloat16"),
        (1, "layers.0.qkv", replace(good, scale=float("nan")), "scale nan; must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner.adapters.set(slot, {name: (part,)})
    assert torch.equal(_run(runner, dtype, [2], [1])[0], before)
    if isinstance(runner, NativeProgram):
        for wrong in (-2, 2):
            with pytest.raises(IndexError, match=f"adapter slot {wrong}, must be from -1 to 1"):
                _run(runner, dtype, [2], [wrong])
