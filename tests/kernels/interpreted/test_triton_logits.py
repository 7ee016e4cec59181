"""Penalties and bans against the twin, in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from quire.kernels import reference_sampling
from quire.kernels.launch import ADJUST_BLOCK
from quire.kernels.triton_logits import adjust_logits


@pytest.mark.parametrize("num_pairs", [0, 1, 17, ADJUST_BLOCK + 3])
def test_adjusting_touches_the_pairs_it_is_given_and_has_the_bits_of_the_twin(
    num_pairs: int,
) -> None:
    rng = np.random.default_rng(num_pairs)
    wide = torch.randn(5, 400, generator=torch.Generator().manual_seed(1))
    cells = rng.permutation(5 * 390)[:num_pairs]
    arguments = {
        "rows_E": torch.from_numpy((cells // 390).astype(np.int32)),
        "token_ids_E": torch.from_numpy((cells % 390).astype(np.int32)),
        "counts_E": torch.from_numpy(rng.integers(-1, 4, num_pairs).astype(np.int32)),
        "presence_S": torch.tensor([0.0, 0.4, -0.2, 0.0, 1.1]),
        "frequency_S": torch.tensor([0.0, 0.13, 0.0, 0.7, -0.3]),
        "repetition_S": torch.tensor([1.0, 1.3, 0.7, 1.0, 1.1]),
    }
    got, want = wide.clone(), wide.clone()
    adjust_logits(got[:, :390], **arguments)
    reference_sampling.adjust_logits(want[:, :390], **arguments)
    assert torch.equal(got, want)
    assert (got != wide).sum() <= num_pairs
