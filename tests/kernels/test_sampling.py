"""Native sampling and log-probabilities of adversarial logits, on every instruction set."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tools.kernels.testing import adjustments

from quire.kernels.native import library as native
from quire.kernels.native import sampling
from quire.kernels.native.sampling import Scores, adjust_logits, draw, score
from quire.kernels.reference import sampling as reference_sampling

SIZES = [1, 17, 64, 1000, 3001]


def adversarial(size: int) -> torch.Tensor:
    """Logits with plain rows and ones that are equal, of few values, nearly equal, mostly banned,
    with one huge logit, flat, and ascending."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(8, size, generator=generator) * 4
    rows[1] = 2.5
    rows[2] = rows[2].round()
    rows[3] = rows[3] * 1e-20
    rows[4, : size // 2] = -math.inf
    rows[5, size // 2] = 3e38
    rows[6] *= 0.01
    rows[7] = rows[7].sort().values
    return rows


InEachSet = Callable[[Callable[[], Any]], list[Any]]


@pytest.fixture(params=["the best set", pytest.param("each set", marks=pytest.mark.slow)])
def in_each_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> InEachSet:
    """Results of a function with the library of each instruction set that this CPU has."""
    isas = native.available_isas()

    def in_each(compute: Callable[[], Any]) -> list[Any]:
        found = []
        for isa in isas if request.param == "each set" else isas[:1]:
            loaded = native.load(isa)
            monkeypatch.setattr(sampling, "library", lambda loaded=loaded: loaded)
            found.append(compute())
        return found

    return in_each


@pytest.mark.parametrize("size", SIZES)
def test_draws_are_those_of_the_twin_that_sorts(
    size: int, in_each_set: InEachSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(size)
    count = 160
    columns: dict[str, Any] = {
        "rows_R": np.arange(count) % 8,
        "temperature_R": rng.choice([1e-6, 0.3, 1.0, 90.0], count).astype(np.float32),
        "top_k_R": rng.choice([0, 1, 40, 64, 65, 5000], count),
        "top_p_R": rng.choice([1e-6, 0.5, 0.9, 1.0], count),
        "min_p_R": rng.choice([0.0, 1e-9, 0.05, 1.0], count),
        "uniform_R": rng.choice([0.0, 0.5, 1 - 2**-53, *rng.random(5)], count),
    }
    logits = adversarial(size)
    monkeypatch.setattr(sampling, "library", lambda: None)
    expected = draw(logits, **columns).tolist()
    for drawn in in_each_set(lambda: draw(logits, **columns).tolist()):
        assert drawn == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_top", [0, 1, 20, 5000])
def test_scores_are_those_of_float64(
    size: int, num_top: int, in_each_set: InEachSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = adversarial(size)
    token_ids = np.random.default_rng(size).integers(0, size, 8)
    token_ids[4:6] = size // 2, 0
    plain = logits.double().numpy()
    greatest = plain.max(axis=1, keepdims=True)
    values = plain - (greatest + np.log(np.exp(plain - greatest).sum(axis=1, keepdims=True)))
    own = np.take_along_axis(values, token_ids[:, None], axis=1)
    columns = {"rows_R": np.arange(8), "token_ids_R": token_ids, "num_top_R": np.full(8, num_top)}
    each = in_each_set(lambda: score(logits, **columns))
    # Ordered by logits: in row 3 different logits have equal, rounded log-probabilities.
    order = np.argsort(-plain, axis=1, kind="stable")[:, :num_top]
    ranks = 1 + (plain > np.take_along_axis(plain, token_ids[:, None], axis=1)).sum(axis=1)
    monkeypatch.setattr(sampling, "library", lambda: None)
    without = score(logits, **columns)
    found: Scores
    for found in (*each, without):
        np.testing.assert_allclose(found.logprobs_R, own[:, 0], rtol=1e-14, atol=1e-12)
        assert found.ranks_R.tolist() == ranks.tolist()
        best = np.take_along_axis(values, order, axis=1)
        np.testing.assert_allclose(found.top_RK, best, rtol=1e-14, atol=1e-12)
        assert found.top_ids_RK.tolist() == order.tolist()
    assert len({tuple(array.tobytes() for array in found) for found in each}) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("words", ["all", "too few", "whole"])
def test_masked_logits_are_those_of_the_twin(size: int, words: str, in_each_set: InEachSet) -> None:
    arguments = adjustments(8, size, num_pairs=min(size, 40), num_masks=6)
    mask_KW = arguments["mask_KW"]
    if words == "too few":
        arguments["mask_KW"] = mask_KW[:, : mask_KW.shape[1] // 2]
    elif words == "whole":
        mask_KW[:, ::2], mask_KW[::2, 1::2] = -1, 0
    expected = adversarial(size)
    reference_sampling.adjust_logits(expected, **arguments)

    def adjusted() -> torch.Tensor:
        logits = torch.zeros(8, size + 3)[:, :size].copy_(adversarial(size))
        adjust_logits(logits, **arguments)
        return logits

    for got in in_each_set(adjusted):
        assert torch.equal(got, expected)
