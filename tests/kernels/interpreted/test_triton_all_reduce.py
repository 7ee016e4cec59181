"""The all-reduce kernel of one rank whose peers have already arrived, in Triton's interpreter.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``. The interpreter runs one rank at a
time, so the tests write the other ranks' pieces and flags in advance.
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

from tools.kernels.ranks import LocalRanks

from quire.kernels.triton.all_reduce import MAX_BYTES, all_reduce, fits
from quire.kernels.triton.launch import ALL_REDUCE_BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 3)])
def test_each_rank_gets_the_sum_in_the_order_of_the_ranks(
    size: int, rank: int, dtype: torch.dtype
) -> None:
    ranks = LocalRanks(size, dtype)
    rng = torch.Generator().manual_seed(size)
    for epoch, num_values in enumerate((8, ALL_REDUCE_BLOCK + 8, 16, 64), 1):
        inputs = [torch.randn(num_values, generator=rng).to(dtype) for _ in range(size)]
        ranks.epochs[rank] = epoch - 1
        got = ranks.reduce_alone(rank, inputs)
        want = inputs[0].float()
        for x in inputs[1:]:
            want = want + x.float()
        assert torch.equal(got, want.to(dtype))
        num_programs = -(-num_values // ALL_REDUCE_BLOCK)
        assert (ranks.flags[:, :num_programs, rank] == epoch).all()
        assert (ranks.epochs[rank, :num_programs] == epoch).all()
        assert (ranks.epochs[rank, num_programs:] == epoch - 1).all()


def test_meetings_go_on_when_their_count_passes_the_largest_integer() -> None:
    ranks = LocalRanks(2, torch.float32)
    ranks.epochs.fill_(2**31 - 1)
    ranks.flags.fill_(-(2**31))
    ranks.buffers[1, 0, :8] = 2.0
    x = torch.ones(8)
    assert all_reduce(x, ranks.peers[0]) is x
    assert x.tolist() == [3.0] * 8
    assert ranks.epochs[0, 0] == -(2**31)


def test_what_is_too_large_is_left_to_others() -> None:
    assert fits(torch.zeros(MAX_BYTES // 2, dtype=torch.bfloat16))
    assert not fits(torch.zeros(MAX_BYTES // 2 + 8, dtype=torch.bfloat16))
    assert not fits(torch.zeros(12))
    assert not fits(torch.zeros(8, 9).T[:, 1:])
    assert fits(torch.zeros(8, 8))
    assert all_reduce(torch.zeros(0), LocalRanks(2, torch.float32).peers[0]).shape == (0,)
