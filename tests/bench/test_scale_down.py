"""The comparison of who goes, on a made-up trace of which one can tell what is best."""

from collections.abc import Callable
from types import ModuleType

from quire.cluster.autoscaling.settings import AutoscalingSettings
from quire.router.simulate.trace import Row, Trace
from quire.router.simulate.trace_files import block_name

BenchModule = Callable[[str], ModuleType]
SETTINGS = AutoscalingSettings(min_groups=1, max_groups=3, down_delay_s=20, down_step_s=5)


def conversations() -> Trace:
    """A burst of prompts that nobody asks twice, and then twelve long ones again and again."""
    rows = [Row(50.0 * i, 8192, 8, ()) for i in range(600)]
    chains = [tuple(block_name((number, i)) for i in range(15)) for number in range(12)]
    rows += [Row(30_000 + 500.0 * i, 8000, 8, chains[i % 12]) for i in range(600)]
    return Trace.of(rows, name="made up", block_size=512)


def test_what_goes_by_worth_costs_no_more_than_what_goes_by_chance(
    bench_module: BenchModule,
) -> None:
    bench_module("autoscale_replay")
    scale_down = bench_module("scale_down")
    replay = scale_down.Forking(conversations(), SETTINGS, start_ms=5_000, after_ms=60_000)
    replay.run()
    assert replay.forks
    assert max(replay.ttft_ms) < float("inf")
    rows = scale_down.compared(replay.forks)
    computed = {name: row[0] for name, row in rows.items()}
    assert computed["best"] <= computed["any"] <= computed["worst"]
    assert computed["worth"] < computed["any"]


def test_trying_what_is_not_chosen_changes_nothing(bench_module: BenchModule) -> None:
    autoscale = bench_module("autoscale_replay")
    scale_down = bench_module("scale_down")
    plain = autoscale.Replay(conversations(), SETTINGS, start_ms=5_000)
    forking = scale_down.Forking(conversations(), SETTINGS, start_ms=5_000, after_ms=10_000)
    plain.run()
    forking.run()
    assert forking.forks
    assert forking.ttft_ms == plain.ttft_ms
    assert forking.changes == plain.changes
