"""Matrix products with 4-bit weights against the decoded weights', in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from tools.kernels.testing import grouped_weight

from quire.kernels.triton.grouped import GroupedLinear


@pytest.mark.quick_cells(5)
@pytest.mark.parametrize("num_rows", [0, 1, 70])
@pytest.mark.parametrize(("num_in", "group"), [(64, 32), (72, 8), (384, 128)])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_the_product_is_that_of_the_decoded_weights(
    num_rows: int, num_in: int, group: int, has_zeros: bool
) -> None:
    weight = grouped_weight(40, num_in, group=group, has_zeros=has_zeros, dtype=torch.float32)
    generator = torch.Generator().manual_seed(num_rows)
    bias_O = torch.randn(40, generator=generator) if has_zeros else None
    layer = GroupedLinear.of(weight, bias_O)
    assert torch.equal(layer.decode(), weight.decode())
    x_TI = torch.randn(num_rows, num_in, generator=generator)
    found = layer(x_TI)
    expected = torch.nn.functional.linear(x_TI, weight.decode(), bias_O)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if num_rows:
        assert torch.equal(layer(x_TI[-1:]), found[-1:])
