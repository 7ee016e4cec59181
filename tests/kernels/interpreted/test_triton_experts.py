"""The matrix products of experts against plain ones, in Triton's interpreter.

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

from quire.kernels.ops import Clamped, MixExperts
from quire.kernels.torch.experts import Expert, Router, multiply_one_by_one
from quire.kernels.triton.backend import TritonBackend

C, F, E, TOP = 72, 40, 5, 2


def mixture(
    backend: TritonBackend, *, dtype: torch.dtype, activation: Any = "silu", bias: bool = False
) -> MixExperts:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    generator = torch.Generator().manual_seed(2)
    experts = tuple(
        Expert(
            up=backend.pack_gated_linear(
                random(2 * F, C), random(2 * F) if bias else None, activation=activation
            ),
            down=backend.pack_linear(random(C, F)),
        )
        for _ in range(E)
    )
    router = Router(layer=backend.pack_router(random(E, C)), num_experts=E, top_k=TOP)
    return MixExperts(
            name="layers.0",
        router=router, experts=experts, shared=None, bias_EC=None, is_split=False,
        x="normed", out="branch",
    )  # fmt: skip


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("num_tokens", [1, 7, 150])
@pytest.mark.parametrize(
    ("dtype", "activation", "bias"),
    [
        (torch.float32, "silu", False),
        (torch.float16, "silu", False),
        (torch.float16, Clamped(alpha=1.702, limit=7.0), True),
    ],
    ids=["float32", "float16", "clamped with biases"],
)
def test_each_token_gets_what_its_experts_make_of_it(
    num_tokens: int, dtype: torch.dtype, activation: Any, bias: bool
) -> None:
    backend = TritonBackend()
    op = mixture(backend, dtype=dtype, activation=activation, bias=bias)
    backend.prepare((op,))
    generator = torch.Generator().manual_seed(num_tokens)
    x_TC = torch.randn(num_tokens, C, generator=generator).to(dtype)
    experts_Tk, _ = backend.choose_experts(op.router, op.router.scores(x_TC))
    found = backend.multiply_experts(op, x_TC, experts_Tk)
    expected = multiply_one_by_one(op, x_TC, experts_Tk)
    assert found.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    few = torch.tensor([num_tokens - 1, 0])  # Other neighbours and another order.
    again = backend.multiply_experts(op, x_TC[few], experts_Tk[few])
    assert torch.equal(again, found.view(num_tokens, TOP, C)[few].flatten(0, 1))


@pytest.mark.slow
def test_experts_without_tokens_and_all_tokens_of_one_expert() -> None:
    backend = TritonBackend()
    op = mixture(backend, dtype=torch.float32)
    backend.prepare((op,))
    x_TC = torch.randn(70, C, generator=torch.Generator().manual_seed(1))
    for experts in ([4, 1], [0, 4], [2, 3]):
        experts_Tk = torch.tensor([experts] * 70)
        found = backend.multiply_experts(op, x_TC, experts_Tk)
        expected = multiply_one_by_one(op, x_TC, experts_Tk)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert backend.multiply_experts(op, x_TC[:0], experts_Tk[:0]).shape == (0, C)
