"""The low-rank products of LoRA adapters against plain PyTorch, in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from quire.kernels.ops import AdapterLayers, Embed, GatedLinear, Linear, LowRank, Op
from quire.kernels.torch.low_rank import PlainLowRank, StepAdapters, multiply
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.low_rank import TritonLowRank

C, Q, KV, F, SLOTS = 72, 96, 40, 56, 5


def program(dtype: torch.dtype) -> tuple[Op, ...]:
    backend, generator = TritonBackend(), torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    qkv = backend.pack_linear(random(Q + 2 * KV, C), random(Q + 2 * KV))
    gate_up = backend.pack_gated_linear(random(2 * F, C))
    return (
        Embed(weight_VC=random(3, C), out="residual"),
        Linear(name="layers.0.qkv", layer=qkv, x="normed", out="qkv"),
        GatedLinear(name="layers.0.gate_up", layer=gate_up, x="normed", out="hidden"),
    )


def adapter(seed: int, dtype: torch.dtype) -> AdapterLayers:
    generator = torch.Generator().manual_seed(seed)

    def part(rank: int, first: int, height: int) -> LowRank:
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, C), (height, rank)))
        return LowRank(
            a_RI=(a / C**0.5).to(dtype),
            b_OR=(b / rank**0.5).to(dtype),
            first_row=first,
            scale=0.5 * seed,
        )

    rank = (1, 16, 17, 3, 40)[seed % SLOTS]
    layers: dict[str, tuple[LowRank, ...]] = {
        "layers.0.qkv": (part(rank, 0, Q), part(2, Q, KV), part(rank, Q + KV, KV))
    }
    if seed % 2:
        layers["layers.0.gate_up"] = (part(rank, 0, F), part(rank, F, F))
    return layers


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.0.gate_up"])
def test_each_token_gets_what_its_adapter_adds(
    num_tokens: int, dtype: torch.dtype, name: str
) -> None:
    ops = program(dtype)
    layer = next(op for op in ops if isinstance(op, Linear | GatedLinear) and op.name == name).layer
    plain, triton = PlainLowRank(ops), TritonLowRank(ops)
    for each in (plain, triton):
        each.open(num_slots=SLOTS, max_rank=40)
        for slot in range(1, SLOTS):
            each.set(slot, adapter(slot, dtype))
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, C, generator=generator).to(dtype)
    slots = torch.randint(-1, SLOTS, (num_tokens,), generator=generator).int()
    found = multiply(layer, name, x, StepAdapters.of(triton, slots))
    expected = multiply(layer, name, x, StepAdapters.of(plain, slots))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    has_none = slots <= 0
    assert torch.equal(found[has_none], layer(x)[has_none])
    if num_tokens < 2:
        return
    assert (found - layer(x))[~has_none].abs().amax(0).gt(0).any()
    few = torch.tensor([num_tokens - 1, 3, 0])  # Other neighbours, another order and other slots.
    for slot in range(SLOTS):
        triton.set(slot, adapter((slot + 1) % SLOTS, dtype) if slot < SLOTS - 1 else None)
    moved = torch.where(slots > 0, slots - 1, torch.where(slots == 0, SLOTS - 1, slots)).int()
    again = multiply(layer, name, x[few], StepAdapters.of(triton, moved[few]))
    assert torch.equal(again, found[few])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_share_of_a_sum_has_its_ranks_behind_it(dtype: torch.dtype) -> None:
    """As on two ranks that hold half of the inputs each, in the products' type."""
    ops = program(dtype)
    layer: Any = ops[1]
    layers = TritonLowRank(ops)
    layers.open(num_slots=SLOTS, max_rank=40)
    for slot in range(SLOTS):
        layers.set(slot, adapter(slot, dtype))
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(21, C, generator=generator).to(dtype)
    step = StepAdapters.of(layers, torch.randint(-1, SLOTS, (21,), generator=generator).int())
    assert step is not None
    sums = []
    for mine in (slice(C // 2), slice(C // 2, C)):
        part = torch.zeros_like(x)
        part[:, mine] = x[:, mine]
        product = torch.nn.functional.linear(part, layer.layer.weight_OI)
        ax = step.shrink(layer.name, part)
        assert ax is not None
        sums.append(torch.cat([product, ax.to(dtype)], dim=1))
    summed, width = sums[0] + sums[1], product.shape[1]
    found = step.expand(layer.name, summed[:, :width], summed[:, width:]) + layer.layer.bias_O
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = multiply(layer.layer, layer.name, x, step)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_a_changed_slot_stays_where_a_graph_found_it() -> None:
    ops = program(torch.float32)
    layers = TritonLowRank(ops)
    layers.open(num_slots=2, max_rank=40)

    def addresses() -> list[int]:
        return [
            getattr(memory, field).data_ptr()
            for memory in layers._layers.values()
            for field in ("a_SRI", "b_SN", "ranks_S", "parts_SPF", "scales_SP")
        ]

    before = addresses()
    x, slots = torch.randn(9, C), torch.tensor([0, 1, -1] * 3).int()
    step = StepAdapters.of(layers, slots)
    layer: Any = ops[1]

    def run() -> Tensor:
        return multiply(layer.layer, layer.name, x, step)

    empty = run()
    layers.set(0, adapter(4, torch.float32))  # a high rank, and then a lower one
    layers.set(0, adapter(2, torch.float32))
    layers.set(1, adapter(3, torch.float32))
    found = run()
    fresh = TritonLowRank(ops)
    fresh.open(num_slots=2, max_rank=40)
    fresh.set(0, adapter(2, torch.float32))
    fresh.set(1, adapter(3, torch.float32))
    assert torch.equal(found, multiply(layer.layer, layer.name, x, StepAdapters.of(fresh, slots)))
    assert not torch.equal(found, empty)
    layers.set(0, None)
    layers.set(1, None)
    assert torch.equal(run(), empty)
    assert addresses() == before


def test_an_adapter_that_a_gpu_has_no_room_for_is_refused() -> None:
    layers = TritonLowRank(program(torch.float32))
    layers.open(num_slots=1, max_rank=8)
    one = LowRank(a_RI=torch.ones(8, C), b_OR=torch.ones(Q + 2 * KV, 8), first_row=0, scale=1.0)
    with pytest.raises(ValueError, match=r"parts, ranks, values of B\) \(2, 32, 5632\); a GPU has"):
        layers.set(0, {"layers.0.qkv": (one, one)})
