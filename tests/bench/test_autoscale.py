"""The replay of the autoscaling policy, on a made-up trace."""

from collections.abc import Callable
from types import ModuleType

import pytest

from quire.cluster.scaling.settings import AutoscalingSettings
from quire.simulate.trace import Row, Trace

BenchModule = Callable[[str], ModuleType]
SETTINGS = AutoscalingSettings(min_groups=1, max_groups=6, down_delay_s=60, down_step_s=5)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Five prompts of 4,096 tokens a second for two minutes, none of which is known."""
    rows = [Row(200.0 * i, 4096, 8, ()) for i in range(600)]
    return Trace.of(rows, name="made up", block_size=512)


def test_rates_set_how_fast_requests_come(trace: Trace, bench_module: BenchModule) -> None:
    replayed = bench_module("autoscale_replay").at_rates(trace, [1.0, 4.0, 0.0, 2.0], minutes=4)
    counts = [0] * 4
    for arrival_ms in replayed.arrival_ms:
        counts[int(arrival_ms // 60_000)] += 1
    assert counts == pytest.approx([300, 1200, 0, 600], abs=3)


def test_every_request_is_served_and_groups_come_and_go(
    trace: Trace, bench_module: BenchModule
) -> None:
    autoscale = bench_module("autoscale_replay")
    burst = autoscale.at_rates(trace, [1.0, 6.0, 0.5], minutes=9)
    replay = autoscale.Replay(burst, SETTINGS, start_ms=10_000)
    replay.run()
    assert max(replay.ttft_ms) < float("inf")
    sizes = [size for _, size, _ in replay.changes]
    assert sizes[0] == 1
    assert max(sizes) > 2
    assert sizes[-1] < max(sizes)
    (first_up_s, *_), *_ = [change for change, before in replay.steps() if change[1] > before[1]]
    assert 180 <= first_up_s <= 185


def test_a_fixed_number_of_groups_costs_its_time(trace: Trace, bench_module: BenchModule) -> None:
    replay = bench_module("autoscale_replay").Replay(trace, SETTINGS, start_ms=0, fixed=3)
    replay.run()
    assert replay.group_ms == pytest.approx(3 * 120_000, rel=0.01)
    assert max(replay.ttft_ms) < 2_000


def test_without_any_group_requests_wait_for_the_first_to_start(
    trace: Trace, bench_module: BenchModule
) -> None:
    settings = AutoscalingSettings(min_groups=0, max_groups=2)
    replay = bench_module("autoscale_replay").Replay(trace.first(3), settings, start_ms=30_000)
    replay.run()
    assert all(30_000 < ttft_ms < 33_000 for ttft_ms in replay.ttft_ms)
