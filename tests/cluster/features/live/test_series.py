"""Quantiles and rates of the live page's points, against the raw observations."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from quire.cluster.features.live.series import NUM_POINTS, Series, Totals, buckets, quantile, total

BOUNDS = (0.1, 0.2, 0.5, 1.0)


def totals(prompt: float = 0, cached: float = 0, output: float = 0) -> Totals:
    return Totals(prompt, cached, output, [0.0] * 5, [0.0] * 5)


def add(series: Series, counted: Totals, now_s: float) -> list[float | None]:
    series.add(
        counted,
        ttft_bounds=BOUNDS,
        tpot_bounds=BOUNDS,
        num_queued=3,
        num_running=4,
        at_s=1000 + now_s,
        now_s=now_s,
    )
    return series.points[-1]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_quantile_is_in_the_bucket_of_the_true_one(share: float) -> None:
    chance = random.Random(3)
    registry = CollectorRegistry()
    histograms = [
        Histogram(name, "", buckets=BOUNDS, registry=registry) for name in ("first", "second")
    ]
    seen = sorted(chance.random() for _ in range(1000))
    for number, value in enumerate(seen):
        histograms[number % 2].observe(value)
    found = quantile(share, BOUNDS, buckets(histograms))
    assert found is not None
    truth = seen[int(share * len(seen)) - 1]
    assert sum(found > bound for bound in BOUNDS) == sum(truth > bound for bound in BOUNDS)
    assert found == pytest.approx(truth, abs=0.03)  # Values lie evenly in a bucket.


def test_a_quantile_of_nothing_is_none_and_of_what_lies_beyond_is_the_last_bound() -> None:
    assert quantile(0.5, BOUNDS, [0, 0, 0, 0, 0]) is None
    assert quantile(0.5, BOUNDS, [0, 0, 0, 0, 7]) == 1.0


def test_rates_are_of_the_last_seconds_and_not_of_all_time() -> None:
    series = Series()
    assert add(series, totals(), 0.0)[5:] == [0.0, None, 3, 4]
    assert add(series, totals(prompt=100, cached=25, output=50), 2.0)[5:7] == [25.0, 0.25]
    for second in range(3, 20):
        point = add(series, totals(prompt=100, cached=25, output=50), float(second))
    assert point[5:7] == [0.0, None]


def test_a_model_that_leaves_with_its_counts_makes_no_rate_negative() -> None:
    series = Series()
    add(series, totals(prompt=100, cached=25, output=50), 0.0)
    assert add(series, totals(), 1.0)[5:7] == [0.0, None]


def test_points_are_bounded() -> None:
    series = Series()
    for second in range(2 * NUM_POINTS):
        add(series, totals(), float(second))
    assert len(series.points) == NUM_POINTS
    assert series.points[-1][0] == 1000 + 2 * NUM_POINTS - 1


def test_counters_are_added_up() -> None:
    registry = CollectorRegistry()
    counters = [Counter(name, "", registry=registry) for name in ("first", "second")]
    counters[0].inc(2)
    counters[1].inc(3)
    assert total(counters) == 5
