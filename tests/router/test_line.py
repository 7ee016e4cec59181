"""The forecast of waiting times from observed ones, against a trivial queue."""

import random
from collections.abc import Iterator
from math import inf, nan
from statistics import mean, median

import pytest

from quire.router.policies.speeds import MIN_OBSERVATIONS, Line

FIXED_S, PER_TOKEN_S = 0.02, 1e-4


def requests(count: int, *, seed: int = 1, slow: float = 1.0) -> Iterator[tuple[int, float]]:
    """Tokens ahead of each request, and its wait, at a server that is busy 60 % of the time, with
    all times multiplied by ``slow``."""
    draw, now_s, free_s = random.Random(seed), 0.0, 0.0
    rate_s = PER_TOKEN_S * slow
    for _ in range(count):
        missing = draw.choice([16, 100, 500, 1000, 2000])
        now_s += draw.expovariate(0.6 / (723 * rate_s))
        ahead = round(max(free_s - now_s, 0) / rate_s) + missing
        free_s = max(free_s, now_s) + missing * rate_s
        yield ahead, slow * FIXED_S + ahead * rate_s


def errors(line: Line, seen: Iterator[tuple[int, float]]) -> list[float]:
    """Errors of the forecasts at each arrival, relative to the waits."""
    found = []
    for num_tokens, waited_s in seen:
        if line.parts is not None:
            fixed_s, per_token_s = line.parts
            found.append(abs(fixed_s + per_token_s * num_tokens - waited_s) / waited_s)
        line.add(num_tokens, waited_s, weight=1 / waited_s**2)
    return found


def test_a_queues_rates_are_recovered() -> None:
    line = Line(window=20)
    assert max(errors(line, requests(300))[50:]) < 0.02
    assert line.parts == pytest.approx((FIXED_S, PER_TOKEN_S), rel=0.02)


def test_nothing_is_known_before_enough_was_seen() -> None:
    line = Line(window=20)
    for num_tokens, waited_s in requests(MIN_OBSERVATIONS):
        assert line.parts is None
        line.add(num_tokens, waited_s)
    assert line.parts is not None


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_change_of_speed_is_noticed(factor: float) -> None:
    line = Line(window=20)
    errors(line, requests(200))
    after = errors(line, requests(300, slow=factor))
    assert median(after[:5]) > 0.5
    assert median(after[150:]) < 0.05


def test_noise_leaves_errors_of_about_its_own_size() -> None:
    draw, line = random.Random(5), Line(window=20)
    noisy = ((tokens, s * draw.uniform(0.7, 1.3)) for tokens, s in requests(400))
    # With the true rates the mean error is E|1/u - 1| for u in 0.7 to 1.3: 0.158.
    assert mean(errors(line, noisy)[100:]) < 0.2


def test_what_is_all_alike_is_foreseen() -> None:
    line = Line(window=20)
    for _ in range(30):
        line.add(0, 0.25)
    assert line.parts == pytest.approx((0.25, 0.0))


def test_whatever_comes_no_part_is_negative_or_without_bound() -> None:
    draw, line = random.Random(9), Line(window=20)
    for _ in range(3000):
        seconds = draw.choice([0.0, 1e-9, 0.1, 3600.0, -1.0, inf, nan])
        line.add(draw.choice([0, 1, 10**7]), seconds, weight=draw.choice([1.0, 1e6]))
        assert line.parts is None or all(0 <= part < inf for part in line.parts)
