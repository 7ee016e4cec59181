"""Logit bias, penalties and masks against the twin, in Triton's interpreter.

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

from tools.kernels.testing import adjustments

from quire.kernels.reference import sampling as reference_sampling
from quire.kernels.triton.launch import ADJUST_BLOCK, MASK_BLOCK
from quire.kernels.triton.logits import adjust_logits


@pytest.mark.parametrize("num_pairs", [0, 1, 17, ADJUST_BLOCK + 3])
def test_adjusting_touches_the_pairs_it_is_given_and_has_the_bits_of_the_twin(
    num_pairs: int,
) -> None:
    wide = torch.randn(5, 400, generator=torch.Generator().manual_seed(1))
    arguments = adjustments(5, 390, num_pairs=num_pairs, num_masks=0)
    got, want = wide.clone(), wide.clone()
    adjust_logits(got[:, :390], **arguments)
    reference_sampling.adjust_logits(want[:, :390], **arguments)
    assert torch.equal(got, want)
    assert (got != wide).sum() <= 2 * num_pairs


@pytest.mark.parametrize("vocab_size", [31, 64, MASK_BLOCK + 5])
def test_masks_ban_what_they_do_not_allow_and_what_lies_behind_them(vocab_size: int) -> None:
    wide = torch.randn(5, vocab_size + 9)
    arguments = adjustments(5, vocab_size, num_pairs=9, num_masks=3)
    for num_words in range(arguments["mask_KW"].shape[1] + 1):
        arguments["mask_KW"] = arguments["mask_KW"][:, :num_words].contiguous()
        got, want = wide.clone(), wide.clone()
        adjust_logits(got[:, :vocab_size], **arguments)
        reference_sampling.adjust_logits(want[:, :vocab_size], **arguments)
        assert torch.equal(got, want)
        assert want.isinf().any()
