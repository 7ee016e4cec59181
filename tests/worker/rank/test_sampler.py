"""The host sampler against a twin that sorts, and its batch invariance."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.steps import banning

from quire.kernels.native import sampling
from quire.kernels.reference import sampling as reference_sampling
from quire.worker.rank.sampling import draw
from quire.worker.rank.sampling.draw import sample, uniforms
from quire.worker.step.sampling_batch import Edits


def twin_keeps(
    logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """Probabilities of the kept tokens by token id, from a plain sort in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    weights = [math.exp((logits[token] - best) / temperature) for token in order]
    size = top_k or len(order)
    size = min(size, sum(weight >= min_p for weight in weights))
    total, running, kept = sum(weights[:size]), 0.0, 0
    while kept < size and (running < top_p * total or top_p >= 1):
        running += weights[kept]
        kept += 1
    return {token: w / running for token, w in zip(order[:kept], weights[:kept], strict=True)}


def support(row_logits: Any, driver: Any, draws: int, **params: Any) -> np.ndarray[Any, Any]:
    """The number of times each token is drawn at ``draws`` positions."""
    logits = row_logits.expand(draws, -1)
    batch = driver.sampling(draws, position=np.arange(draws), **params)
    return np.bincount(sample(logits, batch).token_ids_S, minlength=logits.shape[1])


def kept_by_sampler(row_logits: Any, **params: Any) -> set[int]:
    """Tokens that evenly spaced uniforms reach: all kept ones, except of negligible weight."""
    sweep = np.linspace(0, 1, 1025)[:-1]
    tokens = sampling.draw(
        row_logits[None],
        rows_R=np.zeros(len(sweep), np.int64),
        temperature_R=np.full(len(sweep), params["temperature"], np.float32),
        top_k_R=np.full(len(sweep), params["top_k"]),
        top_p_R=np.full(len(sweep), params["top_p"]),
        min_p_R=np.full(len(sweep), params["min_p"]),
        uniform_R=sweep,
    )
    return set(tokens.tolist())


def test_greedy_takes_the_lowest_id_among_equals(driver: Any) -> None:
    logits = torch.zeros(3, 50)
    logits[0, [7, 9, 31]] = 2.0
    logits[2, [49, 48]] = 1.0
    assert sample(logits, driver.sampling(3)).token_ids_S.tolist() == [7, 0, 48]


@settings(deadline=None, max_examples=examples(100))
@given(
    # Quarters, so that many logits tie, and every weight of the sweep is well above its step.
    logits=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=150),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 63, 64, 65, 200]),
    top_p=st.sampled_from([1e-6, 0.301, 0.7003, 0.9501, 1.0]),
    min_p=st.sampled_from([0.0, 0.0503, 0.301]),
)
def test_the_kept_tokens_are_those_of_a_plain_sort(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = twin_keeps(logits, **params)  # type: ignore[arg-type]
    kept = kept_by_sampler(torch.tensor(logits), **params)
    assert kept <= set(expected)
    assert kept >= {token for token, p in expected.items() if p > 1 / 1024}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 10},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 90, "top_p": 0.95, "min_p": 0.01},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, float], driver: Any) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 2
    draws = 4_000
    counts = support(logits, driver, draws, seed=11, **params)
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    expected = twin_keeps(logits.tolist(), **(defaults | params))  # type: ignore[arg-type]
    assert counts.sum() == draws
    assert set(np.flatnonzero(counts)) <= set(expected)
    # Rare tokens are counted as one, as chi-square asks for five expected draws in each bin.
    often = {token: p for token, p in expected.items() if p * draws >= 5}
    rare = 1 - sum(often.values())
    observed = [counts[token] for token in often] + [draws - sum(counts[t] for t in often)]
    wanted = [p * draws for p in often.values()] + [max(rare, 1e-9) * draws]
    if rare * draws < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    chi_square = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = len(wanted) - 1
    # Normal approximation; 5 sigma, and the seed is fixed.
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_a_draw_is_the_same_in_any_company(driver: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = 70  # more than are sampled at once
    logits = torch.randn(rows, 1000, generator=generator) * 3
    rng = np.random.default_rng(0)
    columns = {
        "temperature": rng.choice([0.0, 0.7, 1.0, 3.0], rows),
        "top_p": rng.choice([1.0, 0.9, 0.5], rows),
        "top_k": rng.choice([0, 5, 50, 64, 400], rows),
        "min_p": rng.choice([0.0, 0.05], rows),
        "seed": rng.integers(0, 2**63 - 1, rows),
        "position": rng.integers(0, 4096, rows),
        "num_logprobs": rng.choice([-1, 0, 3], rows),
    }
    together = sample(logits, driver.sampling(rows, **columns))
    order = rng.permutation(rows)
    shuffled = sample(
        logits[torch.from_numpy(order)],
        driver.sampling(rows, **{name: values[order] for name, values in columns.items()}),
    )
    assert np.array_equal(shuffled.token_ids_S, together.token_ids_S[order])
    for row in range(rows):
        alone = sample(
            logits[row : row + 1],
            driver.sampling(1, **{name: values[row] for name, values in columns.items()}),
        )
        assert alone.token_ids_S[0] == together.token_ids_S[row]
        assert (alone.logprobs or (None,))[0] == together.logprobs[row]


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize("vocab_size", [7, 500, 20_000])
@pytest.mark.parametrize("kind", ["steep", "flat", "ties", "equal"])
def test_every_draw_is_that_of_the_plain_twin(vocab_size: int, kind: str, driver: Any) -> None:
    num_rows = 240
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5))
    logits *= {"steep": 4, "flat": 0.1, "ties": 2, "equal": 0}[kind]
    if kind == "ties":
        logits = logits.round()
        logits[:, ::3] = -torch.inf
    rng = np.random.default_rng(2)
    columns = {
        "temperature": rng.choice([0.0, 0.1, 0.7, 1.0, 5.0], num_rows).astype(np.float32),
        "top_p": rng.choice([0.99, 0.9, 0.5, 1e-3, 1.0], num_rows).astype(np.float32),
        "top_k": rng.choice([0, 0, 1, 5, 100, 3000], num_rows).astype(np.int32),
        "min_p": rng.choice([0.0, 0.02], num_rows).astype(np.float32),
        "seed": rng.integers(0, 2**63 - 1, num_rows),
        "position": np.arange(num_rows),
    }
    batch = driver.sampling(num_rows, **columns)
    twin = reference_sampling.sample(
        logits, **{f"{name}_S": torch.from_numpy(column) for name, column in columns.items()}
    )
    assert sample(logits, batch).token_ids_S.tolist() == twin.tolist()


def test_extreme_temperatures_stay_finite(driver: Any) -> None:
    logits = torch.tensor([[0.0, 80.0, -80.0, 79.0]]).expand(64, -1)
    cold = sample(logits, driver.sampling(64, temperature=1e-6, position=np.arange(64)))
    assert set(cold.token_ids_S) == {1}
    hot = sample(logits, driver.sampling(64, temperature=100.0, position=np.arange(64)))
    assert set(hot.token_ids_S) == {0, 1, 2, 3}


@pytest.mark.parametrize("vocab_size", [40, 1000])
def test_a_row_of_nan_harms_no_other(vocab_size: int, driver: Any) -> None:
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(4))
    columns = {
        "temperature": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "top_p": [1.0, 1.0, 0.9, 0.9, 1.0, 1.0, 0.5, 1.0],
        "top_k": [0, 0, 0, 0, 9, 500, 500, 0],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1],
        "num_logprobs": 2,
    }
    whole = sample(logits, driver.sampling(8, **columns))
    for broken in range(8):
        damaged = logits.clone()
        damaged[broken] = float("nan")
        output = sample(damaged, driver.sampling(8, **columns))
        others = np.arange(8) != broken
        assert np.array_equal(output.token_ids_S[others], whole.token_ids_S[others])
        assert 0 <= output.token_ids_S[broken] < vocab_size


def test_banned_tokens_are_never_drawn(driver: Any) -> None:
    logits = torch.zeros(200, 8)
    logits[:, 3] = 9.0
    banned = {row: banning([3, 5]) for row in range(100)}
    columns = {"position": np.arange(200), "temperature": [0.0, 1.0] * 100}
    tokens = sample(logits, driver.sampling(200, edits=banned, **columns)).token_ids_S
    assert not {3, 5} & set(tokens[:100])
    assert 3 in tokens[100:]
    assert logits[0, 3] == 9.0, "the caller's logits are left alone"


def test_penalties_are_those_of_their_definition(driver: Any) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.0], [2.0, 1.9, -1.0, 1.0]])
    penalties = Edits(
        presence=0.05,
        frequency=0.1,
        repetition=2.0,
        seen_ids_E=np.array([0, 1, 2]),
        seen_counts_E=np.array([0, 3, 0], np.int32),
    )
    adjusted = draw._adjust(logits, driver.sampling(2, edits={1: penalties}))
    torch.testing.assert_close(
        adjusted, torch.tensor([[2.0, 1.9, -1.0, 1.0], [1.0, 0.95 - 0.3 - 0.05, -2.0, 1.0]])
    )


def test_logprobs_are_of_the_model_itself(driver: Any) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(8)).double().float()
    logits[0, 7] = logits[0, 4] = 5.0
    batch = driver.sampling(
        2, temperature=[0.0, 0.3], num_logprobs=[3, -1], edits={0: banning([4])}
    )
    first, second = sample(logits, batch).logprobs
    assert first is not None
    expected = torch.log_softmax(logits[0].double(), dim=0)
    assert second is None
    assert first.token_id == 7
    assert first.logprob == pytest.approx(float(expected[7]), abs=1e-12)
    assert first.rank == 1, "as probable as the best"
    assert [token for token, _ in first.top][:2] == [4, 7]
    assert [p for _, p in first.top] == pytest.approx(
        expected.sort(descending=True)[0][:3].tolist()
    )
    only = sample(logits, driver.sampling(2, num_logprobs=[0, -1])).logprobs[0]
    assert only is not None
    assert (only.token_id, only.top) == (4, ())


def test_uniforms_are_spread_and_independent_of_neighbours() -> None:
    seeds = np.repeat(np.arange(200), 200)
    positions = np.tile(np.arange(200), 200)
    numbers = uniforms(seeds, positions)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == len(numbers)
    grid = numbers.reshape(200, 200)
    for shifted, rest in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(shifted.ravel(), rest.ravel())[0, 1]) < 0.02
    histogram = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((histogram - 400) ** 2 / 400).sum() < 99 + 5 * math.sqrt(2 * 99)


def test_uniforms_are_those_of_splitmix64() -> None:
    """Against Python's integers. Any change would alter the output of every seeded request."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    for seed, position in ((0, 0), (1, 0), (2**63 - 1, 7), (12345, 10**6)):
        z = mix((mix((seed + golden) & mask) + golden * (position + 1)) & mask)
        assert uniforms(np.array([seed]), np.array([position]))[0] == (z >> 11) / 2**53
