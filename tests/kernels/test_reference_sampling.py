"""The sampling twin against exact arithmetic and against the host sampler."""

import numpy as np
import pytest
import torch

from quire.kernels.reference import sampling as reference_sampling
from quire.worker.rank.sampling import draw


def test_sampling_weights_are_those_of_exact_arithmetic_to_the_last_bits_of_float32() -> None:
    logits = torch.linspace(-30, 4, 5000)
    for temperature in (0.5, 1.0, 3.0):
        got = reference_sampling.sampling_weights(logits, temperature=torch.tensor(temperature))
        want = 2.0**32 * torch.exp((logits.double() - 4) / temperature)
        assert got[-1] == 2**32
        # Half a rounding of exponents up to 40, and a few roundings of the polynomial.
        assert torch.all((got - want).abs() <= want * 3e-6 + 1)


@pytest.mark.parametrize("position", [0, 1, 2**31])
def test_the_random_number_is_that_of_the_sampler(position: int) -> None:
    seeds = [0, 1, 2**40 + 7, 2**63 - 1]
    want = draw.uniforms(np.array(seeds), np.full(4, position))
    assert [reference_sampling.random_uniform(seed, position) for seed in seeds] == want.tolist()


@pytest.mark.slow
def test_sampling_keeps_what_every_limit_allows() -> None:
    draws = 2000
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0]).expand(draws, -1)
    ones, zeros = torch.ones(draws), torch.zeros(draws)
    kept = {}
    for name, limits in {
        "none": (0, 1.0, 0.0),
        "top-k 3": (3, 1.0, 0.0),
        "top-k 2": (2, 1.0, 0.0),
        "top-p": (0, 0.6, 0.0),
        "min-p": (0, 1.0, 0.2),
        "top-k, then top-p": (2, 0.7, 0.0),
    }.items():
        tokens = reference_sampling.sample(
            logits,
            temperature_S=ones,
            top_k_S=zeros.int() + limits[0],
            top_p_S=ones * limits[1],
            min_p_S=ones * limits[2],
            seed_S=zeros.long(),
            position_S=torch.arange(draws),
        )
        kept[name] = set(tokens.tolist())
    # Probabilities 0.53, 0.07, 0.20, 0.20, 0.03; of the two most probable 0.73 and 0.27.
    assert kept == {
        "none": {0, 1, 2, 3, 4},
        "top-k 3": {0, 2, 3},
        "top-k 2": {0, 2},
        "top-p": {0, 2},
        "min-p": {0, 2, 3},
        "top-k, then top-p": {0},
    }
