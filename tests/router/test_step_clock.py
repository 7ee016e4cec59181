"""The step clock, which estimates from a group's frames how far its current step is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.policies.decide import decide
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupState, RouteRequest
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.policies.speeds import MIN_OBSERVATIONS, StepClock
from quire.router.prefix_index.directory import GroupId


def run(clock: StepClock, queues: list[int], *, fixed_s: float, per_token_s: float) -> float:
    """Runs steps whose durations are linear in their work; returns the time of the last frame."""
    at_s = 100.0
    clock.frame(step=-2, at_s=at_s, num_queued=10_000, is_idle=False)
    clock.frame(step=-1, at_s=at_s, num_queued=0, is_idle=True)  # A step's capacity.
    for step, queued in enumerate(queues):
        clock.frame(step=step, at_s=at_s, num_queued=queued, is_idle=False)
        at_s += fixed_s + per_token_s * queued
    clock.frame(step=len(queues), at_s=at_s, num_queued=queues[-1], is_idle=False)
    return at_s


@given(
    queues=st.lists(st.integers(0, 8192), min_size=MIN_OBSERVATIONS, max_size=100),
    fixed_s=st.floats(0.001, 0.1),
    per_token_s=st.floats(0, 1e-3),
)
def test_steps_on_a_line_are_foreseen(
    queues: list[int], fixed_s: float, per_token_s: float
) -> None:
    clock = StepClock()
    began_s = run(clock, queues, fixed_s=fixed_s, per_token_s=per_token_s)
    assert clock.began_s == began_s
    assert clock.length_s == pytest.approx(fixed_s + per_token_s * queues[-1], rel=1e-3)


def test_a_step_does_not_compute_all_of_a_long_queue() -> None:
    clock = StepClock()
    at_s, queued = 100.0, 100_000
    for step in range(10):
        clock.frame(step=step, at_s=at_s, num_queued=queued, is_idle=False)
        at_s += 0.17
        queued -= 8192
    assert clock.num_tokens == 8192
    assert clock.length_s == pytest.approx(0.17)


def test_nothing_is_known_before_enough_steps_were_seen() -> None:
    clock = StepClock()
    run(clock, [100] * (MIN_OBSERVATIONS - 1), fixed_s=0.02, per_token_s=0.0)
    assert clock.length_s == 0


def test_what_an_idle_group_begins_is_not_known_and_its_rest_is_no_step() -> None:
    clock = StepClock()
    at_s = run(clock, [0] * 20, fixed_s=0.02, per_token_s=0.0)
    clock.frame(step=21, at_s=at_s + 0.02, num_queued=0, is_idle=True)
    assert clock.length_s == 0
    clock.frame(step=22, at_s=at_s + 60.0, num_queued=0, is_idle=False)
    assert clock.length_s == pytest.approx(0.02)


def test_a_heartbeat_during_a_step_does_not_begin_another() -> None:
    clock = StepClock()
    at_s = run(clock, [0] * 20, fixed_s=0.02, per_token_s=0.0)
    clock.frame(step=20, at_s=at_s + 0.015, num_queued=500, is_idle=False)
    assert clock.began_s == at_s
    assert clock.length_s == pytest.approx(0.02)


def test_a_heartbeat_during_the_first_step_of_an_idle_group_does_not_begin_one() -> None:
    clock = StepClock()
    at_s = run(clock, [0] * 20, fixed_s=0.02, per_token_s=0.0)
    clock.frame(step=21, at_s=at_s + 0.02, num_queued=0, is_idle=True)
    for beat in range(60):
        clock.frame(step=21, at_s=at_s + beat, num_queued=0, is_idle=True)
        clock.frame(step=21, at_s=at_s + beat + 0.25, num_queued=500, is_idle=False)
    assert clock.length_s == 0
    clock.frame(step=22, at_s=at_s + 60.01, num_queued=0, is_idle=False)
    assert clock.length_s == pytest.approx(0.02)


def test_a_step_behind_one_that_was_aborted_teaches_nothing() -> None:
    clock = StepClock()
    at_s = run(clock, [0] * 20, fixed_s=0.02, per_token_s=0.0)
    clock.frame(step=20, at_s=at_s + 0.01, num_queued=0, is_idle=True)
    assert clock.length_s == 0
    clock.frame(step=21, at_s=at_s + 60.0, num_queued=0, is_idle=False)
    assert clock.length_s == pytest.approx(0.02)


def test_frames_that_were_merged_count_as_the_steps_that_they_are() -> None:
    clock = StepClock()
    at_s = run(clock, [0] * 20, fixed_s=0.02, per_token_s=0.0)
    clock.frame(step=25, at_s=at_s + 0.1, num_queued=0, is_idle=False)
    assert clock.length_s == pytest.approx(0.02)


def test_a_clock_that_goes_back_teaches_nothing() -> None:
    clock = StepClock()
    at_s = run(clock, [0] * 20, fixed_s=0.02, per_token_s=0.0)
    clock.frame(step=21, at_s=at_s - 50.0, num_queued=0, is_idle=False)
    assert clock.length_s == pytest.approx(0.02)


def chosen(first: GroupState, second: GroupState) -> str:
    request = RouteRequest(hashes=(), num_prompt_tokens=1000, block_size=16, now_s=10.0)
    return decide(PrefixAware(), request, Loads([first, second]), [0, 0]).group


def test_of_groups_alike_the_one_whose_step_ends_first_is_chosen() -> None:
    state = GroupState(group=GroupId("a"), num_running=50, step_began_s=9.99, step_s=0.05)
    nearly_done = replace(state, group=GroupId("b"), step_began_s=9.96)
    assert chosen(state, nearly_done) == "b"
    assert (
        chosen(replace(nearly_done, group=GroupId("a")), replace(state, group=GroupId("b"))) == "a"
    )


def test_a_group_whose_frame_is_long_overdue_is_not_taken_to_be_done() -> None:
    state = GroupState(
        group=GroupId("a"),
        num_running=50,
        num_pending_prefill_tokens=5000,
        num_step_tokens=5000,
        step_s=0.05,
    )
    overdue = replace(state, group=GroupId("b"), step_began_s=9.0)
    assert chosen(replace(state, step_began_s=9.98), overdue) == "a"
    assert chosen(replace(overdue, group=GroupId("a")), replace(overdue, num_running=40)) == "b"


def test_requests_sent_since_the_last_frame_are_not_taken_to_be_done() -> None:
    state = GroupState(group=GroupId("a"), num_running=10, step_began_s=9.951, step_s=0.05)
    burst = replace(state, group=GroupId("b"), num_reserved_requests=1, num_reserved_tokens=2000)
    assert chosen(state, burst) == "a"
