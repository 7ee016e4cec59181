"""What a group is worth, by counters that are made up."""

from dataclasses import fields, replace

import pytest

from quire.cluster.group_worth import LATELY_S, GroupWorth
from quire.worker.engine import EngineStats

NOTHING = EngineStats(**{field.name: 0 for field in fields(EngineStats)})  # type: ignore[arg-type]


def test_what_hits_save_counts_and_fades() -> None:
    worth = GroupWorth()
    assert worth.observe(NOTHING, now_s=5000.0) == 0
    hits = replace(NOTHING, num_hit_tokens=1000)
    assert worth.observe(hits, now_s=5001.0) == 1000
    assert worth.observe(hits, now_s=5001.0 + LATELY_S) == pytest.approx(1000 / 2.718, rel=1e-3)
    assert worth.observe(hits, now_s=5001.0 + 20 * LATELY_S) < 1


@pytest.mark.parametrize("interval_s", [0.5, 1.0, 3.0])
def test_a_steady_rate_is_worth_what_it_saves_lately_however_often_it_is_asked(
    interval_s: float,
) -> None:
    worth, now_s, rate = GroupWorth(), 0.0, 40.0
    while now_s < 10 * LATELY_S:
        now_s += interval_s
        stats = replace(NOTHING, num_hit_tokens=round(rate * now_s))
        value = worth.observe(stats, now_s=now_s)
    assert value == pytest.approx(rate * LATELY_S, rel=0.02)


def test_tokens_that_running_requests_hold_are_worth_as_much_as_those_saved() -> None:
    stats = replace(NOTHING, num_hit_tokens=100, num_held_slots=640, num_wasted_slots=40)
    assert GroupWorth().observe(stats, now_s=1.0) == 700
