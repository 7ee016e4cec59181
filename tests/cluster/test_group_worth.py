"""What a group is worth, by counters that are made up."""

import pytest

from quire.cluster.autoscaling.worth import LATELY_S, GroupWorth


def test_what_hits_save_counts_and_fades() -> None:
    worth = GroupWorth()
    assert worth.observe(num_hit_tokens=0, num_held_tokens=0, now_s=5000) == 0
    assert worth.observe(num_hit_tokens=1000, num_held_tokens=0, now_s=5001) == 1000
    later = worth.observe(num_hit_tokens=1000, num_held_tokens=0, now_s=5001 + LATELY_S)
    assert later == pytest.approx(1000 / 2.718, rel=1e-3)
    now_s = 5001 + 20 * LATELY_S
    assert worth.observe(num_hit_tokens=1000, num_held_tokens=0, now_s=now_s) < 1


@pytest.mark.parametrize("interval_s", [0.5, 1.0, 3.0])
def test_a_steady_rate_is_worth_what_it_saves_lately_however_often_it_is_asked(
    interval_s: float,
) -> None:
    worth, now_s, rate = GroupWorth(), 0.0, 40.0
    while now_s < 10 * LATELY_S:
        now_s += interval_s
        num_hits = round(rate * now_s)
        value = worth.observe(num_hit_tokens=num_hits, num_held_tokens=0, now_s=now_s)
    assert value == pytest.approx(rate * LATELY_S, rel=0.02)


def test_tokens_that_running_requests_hold_are_worth_as_much_as_those_saved() -> None:
    assert GroupWorth().observe(num_hit_tokens=100, num_held_tokens=600, now_s=1) == 700
