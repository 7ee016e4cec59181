"""The sampling kernel against its twin, which sorts, and against the engine's host sampler.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from quire.kernels.reference import sampling as reference_sampling
from quire.kernels.triton.launch import SAMPLE_BLOCK
from quire.kernels.triton.sample import sample
from quire.worker.rank.sampling import draw
from quire.worker.step.sampling_batch import SamplingBatch


def parameters(num_rows: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Sampling parameters of rows with every limit, without limits, and greedy ones."""
    rng = np.random.default_rng(seed)

    def choose(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(rng.choice(values, num_rows)).to(dtype)

    return {
        "temperature_S": choose([0.0, 0.6, 1.0, 1.7], torch.float32),
        "top_k_S": choose([0, 0, 1, 3, 40, 5000], torch.int32),
        "top_p_S": choose([1.0, 1.0, 0.95, 0.7003, 1e-6], torch.float32),
        "min_p_S": choose([0.0, 0.0, 0.0503, 0.301], torch.float32),
        "seed_S": torch.from_numpy(rng.integers(0, 2**63, num_rows)),
        "position_S": torch.from_numpy(rng.integers(0, 2**31, num_rows)),
    }


def logits(num_rows: int, vocab_size: int, *, scale: float = 3.0) -> Tensor:
    rng = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=rng) * scale


def by_engine(logits_SV: Tensor, params: dict[str, Tensor]) -> list[int]:
    columns: dict[str, Any] = {name: values.numpy() for name, values in params.items()}
    batch = SamplingBatch(**columns, num_logprobs_S=np.full(len(logits_SV), -1, np.int32))
    return [int(token) for token in draw.sample(logits_SV, batch).token_ids_S]


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("vocab_size", [1, 50, 1000, SAMPLE_BLOCK + 5])
def test_tokens_are_those_of_the_twin_and_of_the_engine(vocab_size: int) -> None:
    rows, params = logits(12, vocab_size), parameters(12, seed=vocab_size)
    # Strided rows, with values between them that no row may read.
    wide = torch.full((12, vocab_size + 7), 1e9)
    wide[:, :vocab_size] = rows
    got = sample(wide[:, :vocab_size], **params).tolist()
    assert got == reference_sampling.sample(rows, **params).tolist()
    assert got == by_engine(rows, params)


@pytest.mark.slow
def test_half_precision_logits_are_sampled_as_the_numbers_that_they_are() -> None:
    rows, params = logits(12, 1000).half(), parameters(12, seed=3)
    assert sample(rows, **params).tolist() == sample(rows.float(), **params).tolist()


@pytest.mark.slow
def test_logits_that_tie_are_kept_by_the_lowest_id() -> None:
    # Quarters, and a zero of either sign; banned tokens too.
    rows = (logits(24, 300, scale=2.0) * 4).round() / 4
    rows[:, ::7] = float("-inf")
    params = parameters(24, seed=5)
    params["temperature_S"].clamp_(min=0.5)
    got = sample(rows, **params).tolist()
    assert got == reference_sampling.sample(rows, **params).tolist()
    assert got == by_engine(rows, params)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    rows = torch.zeros(3, SAMPLE_BLOCK + 20)
    rows[0, [7, 9, SAMPLE_BLOCK + 3]] = 2.0
    rows[1] = -0.0
    rows[1, 4] = 0.0
    rows[2, [SAMPLE_BLOCK + 9, SAMPLE_BLOCK + 8]] = 1.0
    params = parameters(3)
    params["temperature_S"].zero_()
    assert sample(rows, **params).tolist() == [7, 0, SAMPLE_BLOCK + 8]


def test_a_row_draws_the_same_alone() -> None:
    rows, params = logits(6, 200), parameters(6, seed=1)
    together = sample(rows, **params)
    for row in range(6):
        one = {name: values[row : row + 1] for name, values in params.items()}
        assert torch.equal(sample(rows[row : row + 1], **one), together[row : row + 1])


def test_a_row_of_nan_fails_no_other() -> None:
    rows, params = logits(3, 40), parameters(3, seed=2)
    params["temperature_S"].fill_(1.0)
    want = sample(rows, **params)
    rows[1] = float("nan")
    got = sample(rows, **params)
    assert 0 <= got[1] < 40
    assert torch.equal(got[::2], want[::2])


def test_no_rows_are_fine() -> None:
    assert sample(torch.empty(0, 40), **parameters(0)).shape == (0,)
