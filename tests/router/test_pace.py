"""Learning how fast a group is, against a queue too simple to be wrong."""

import random
from collections.abc import Iterator
from math import inf, nan
from statistics import mean, median

import pytest

from quire.router.policies.pace import MIN_OBSERVATIONS, Pace, PaceFit

RATES = Pace(own_s=1e-4, ahead_s=1e-4, beside_s=4e-3, fixed_s=0.02)


class Queue:
    """One server that prefills first come, first served, at ``rate`` tokens a second."""

    def __init__(self, *, seed: int = 1, load: float = 0.6) -> None:
        self.draw = random.Random(seed)
        self.load = load
        self.now_s = self.free_s = 0.0

    def requests(self, count: int, *, slow: float = 1.0) -> Iterator[tuple[dict[str, int], float]]:
        """What each finds when it comes, and how long it waits; all of it ``slow`` times slower."""
        rate_s = RATES.own_s * slow
        for _ in range(count):
            missing = self.draw.choice([16, 100, 500, 1000, 2000])
            self.now_s += self.draw.expovariate(self.load / (723 * rate_s))
            queue_s = max(self.free_s - self.now_s, 0)
            found = {
                "num_missing": missing,
                "num_queued": round(queue_s / rate_s),
                "num_sequences": self.draw.randrange(8),
            }
            self.free_s = max(self.free_s, self.now_s) + missing * rate_s
            yield found, slow * RATES.wait_s(**found)


def errors(fit: PaceFit, requests: Iterator[tuple[dict[str, int], float]]) -> list[float]:
    """Errors of the forecasts as the requests arrive, as shares of the waits."""
    found = []
    for numbers, waited_s in requests:
        if fit.pace is not None:
            found.append(abs(fit.pace.wait_s(**numbers) - waited_s) / waited_s)
        fit.observe(**numbers, waited_s=waited_s)
    return found


def test_a_queues_rates_are_recovered() -> None:
    fit = PaceFit()
    assert max(errors(fit, Queue().requests(300))[50:]) < 0.02
    assert fit.pace is not None
    assert fit.pace == pytest.approx(RATES, rel=0.02)


def test_there_is_no_forecast_before_enough_was_seen() -> None:
    fit = PaceFit()
    for number, (numbers, waited_s) in enumerate(Queue().requests(MIN_OBSERVATIONS)):
        assert fit.pace is None, number
        fit.observe(**numbers, waited_s=waited_s)
    assert fit.pace is not None


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_group_that_changes_its_speed_is_noticed(factor: float) -> None:
    fit, queue = PaceFit(), Queue()
    errors(fit, queue.requests(200))
    after = errors(fit, queue.requests(200, slow=factor))
    assert median(after[:5]) > 0.6
    assert median(after[60:100]) < 0.2
    assert median(after[150:]) < 0.05


def test_noise_leaves_errors_of_its_own_size() -> None:
    draw, fit = random.Random(5), PaceFit()
    noisy = ((numbers, s * draw.uniform(0.7, 1.3)) for numbers, s in Queue().requests(400))
    # With the true rates the mean error is E|1/u - 1| for u in 0.7 to 1.3: 0.158.
    assert mean(errors(fit, noisy)[100:]) < 0.18


def test_single_requests_that_were_held_up_move_little() -> None:
    draw, fit = random.Random(5), PaceFit()
    held_up = [
        (numbers, waited_s * (50 if draw.random() < 0.05 else 1))
        for numbers, waited_s in Queue().requests(400)
    ]
    errors(fit, iter(held_up))
    assert fit.pace is not None
    assert fit.pace == pytest.approx(RATES, rel=0.1)


def test_a_queue_never_seen_is_forecast_at_the_prompts_own_rate() -> None:
    draw, fit = random.Random(2), PaceFit()
    for _ in range(100):
        missing = draw.randrange(10, 4000)
        fit.observe(
            num_missing=missing, num_queued=0, num_sequences=0, waited_s=0.01 + 1e-4 * missing
        )
    assert fit.pace is not None
    forecast_s = fit.pace.wait_s(num_missing=100, num_queued=50_000, num_sequences=0)
    assert forecast_s == pytest.approx(5.02, rel=0.05)


def test_prompts_that_are_all_alike_are_forecast_right() -> None:
    fit = PaceFit()
    for _ in range(30):
        fit.observe(num_missing=0, num_queued=0, num_sequences=0, waited_s=0.25)
    assert fit.pace is not None
    wait_s = fit.pace.wait_s(num_missing=0, num_queued=0, num_sequences=0)
    assert wait_s == pytest.approx(0.25, rel=0.01)


def test_whatever_comes_no_rate_is_negative_or_without_bound() -> None:
    draw, fit = random.Random(9), PaceFit()
    for _ in range(3000):
        fit.observe(
            num_missing=draw.choice([0, 1, 10**6]),
            num_queued=draw.choice([0, 5, 10**7]),
            num_sequences=draw.choice([0, 500]),
            waited_s=draw.choice([0.0, 1e-9, 0.1, 3600.0, -1.0, inf, nan]),
        )
        assert fit.pace is None or all(0 <= rate < inf for rate in fit.pace)
