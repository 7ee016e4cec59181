"""The queue of mask computations: order, time charged to requests, and the limit."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.worker.parts.constraints.mask_queue import Job, Lane, MaskQueue
from quire.worker.text.grammar.mask_cost import ALLOWANCE_S, MaskCost
from quire.worker.text.grammar.matcher import Place
from quire.worker.text.grammar.recent import RecentSeconds


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeMatcher:
    cost: MaskCost


@dataclass
class Bench:
    """A queue with a clock that only the test advances."""

    clock: Clock = field(default_factory=Clock)
    queue: MaskQueue = field(default_factory=lambda: MaskQueue(slow_share=0.1))

    def tenant(self) -> RecentSeconds:
        return RecentSeconds(self.clock)

    def cost(self, *taken_s: float, tenant: RecentSeconds | None = None) -> MaskCost:
        cost = MaskCost(tenant or self.tenant())
        for each in taken_s:
            cost.charge(each)
        return cost

    def put(self, cost: MaskCost) -> Job:
        matcher: Any = FakeMatcher(cost)
        job = Job(matcher, Place(1))
        self.queue.put(job)
        return job

    def take(self) -> Job | None:
        return self.queue.take(self.clock.now_s)

    def finish(self, job: Job, cost_s: float) -> None:
        self.clock.now_s += cost_s
        self.queue.finished(job, cost_s, num_tokens=1, now_s=self.clock.now_s)


TRUSTED = [0.00005] * 16


def test_masks_that_take_little_overtake_all_others() -> None:
    bench = Bench()
    slow = [bench.put(bench.cost(0.08)) for _ in range(3)]
    unknown = bench.put(bench.cost())
    trusted = [bench.put(bench.cost(*TRUSTED)) for _ in range(3)]
    assert [bench.take() for _ in range(3)] == trusted
    assert bench.take() in (unknown, slow[0])


def test_one_of_an_unknown_grammar_and_one_slow_one_are_computed_at_a_time() -> None:
    bench = Bench()
    for _ in range(4):
        bench.put(bench.cost(0.08))
        bench.put(bench.cost())
    begun = [job for job in iter(bench.take, None) if job.lane]
    assert sorted(job.lane.name for job in begun if job.lane) == ["SLOW", "UNKNOWN"]
    trusted = bench.put(bench.cost(*TRUSTED))
    assert bench.take() is trusted


def test_slow_masks_have_their_share_of_the_time_beside_others() -> None:
    bench = Bench()
    busy_s = 0.0
    while bench.clock.now_s < 60:
        bench.put(bench.cost(0.08))
        job = bench.take()
        if job is None:
            pause_s = bench.queue.pause_s(bench.clock.now_s)
            assert pause_s is not None
            bench.clock.now_s += pause_s
            continue
        bench.finish(job, 0.08)
        busy_s += 0.08
    assert busy_s / bench.clock.now_s == pytest.approx(0.1, rel=0.05)


def test_slow_masks_have_all_the_time_where_nothing_else_runs() -> None:
    bench = Bench()
    bench.queue.is_idle = True
    for _ in range(5):
        bench.put(bench.cost(0.08))
        job = bench.take()
        assert job is not None
        bench.finish(job, 0.08)


def test_the_tenant_that_took_least_goes_first() -> None:
    bench = Bench()
    greedy, modest = bench.tenant(), bench.tenant()
    greedy.add(5)
    theirs = [bench.put(bench.cost(0.08, tenant=greedy)) for _ in range(9)]
    own = bench.put(bench.cost(0.08, tenant=modest))
    assert bench.take() is own
    bench.finish(own, 0.01)
    bench.clock.now_s += 1
    assert bench.take() is theirs[0]


def test_a_grammar_that_turns_slow_is_told_from_the_others_and_comes_back() -> None:
    bench = Bench()
    cost = bench.cost(*TRUSTED)
    assert bench.put(cost).next_lane is Lane.TRUSTED
    cost.charge(0.08)
    assert bench.put(cost).next_lane is Lane.SLOW
    for _ in range(80):
        cost.charge(0.00005)
    bench.clock.now_s += 120  # The tenant's charges expire.
    assert bench.put(cost).next_lane is Lane.TRUSTED


def test_no_honest_grammar_is_ever_spent() -> None:
    """The most expensive one measured: a few masks of 30 ms, then a millisecond each."""
    bench = Bench()
    cost = bench.cost(*[0.03] * 8, *[0.001] * 100_000)
    assert not cost.is_spent
    worst = bench.cost(*[ALLOWANCE_S] * 100_000)
    assert not worst.is_spent
    assert worst.tenant.sum_s == 0


def test_a_grammar_is_spent_behind_a_second_that_its_tokens_may_not_take() -> None:
    bench = Bench()
    cost = bench.cost(*[0.08] * 13)
    assert not cost.is_spent
    cost.charge(0.08)
    assert cost.is_spent
    assert "the grammar is ambiguous" in cost.error
    assert "instead of 'list: list list | item'" in cost.error


def test_cheap_tokens_are_no_savings_for_dear_ones() -> None:
    cost = Bench().cost(*[0.0] * 1_000, *[0.08] * 14)
    assert cost.is_spent


def test_a_tenant_with_ever_new_grammars_has_a_budget_too() -> None:
    bench = Bench()
    tenant = bench.tenant()
    first = [bench.cost(*[0.08] * 10, tenant=tenant) for _ in range(2)]
    assert not any(cost.is_spent for cost in first)
    bench.cost(*[0.08] * 10, tenant=tenant)
    assert bench.cost(*[0.08] * 4, tenant=tenant).is_spent
    assert not bench.cost(*[0.08] * 2, tenant=tenant).is_spent  # Each grammar's free allowance.
    assert not bench.cost(*[0.08] * 10).is_spent  # A different tenant's.
    bench.clock.now_s += 300
    assert not bench.cost(*[0.08] * 10, tenant=tenant).is_spent


def test_a_grammar_whose_outputs_take_too_much_work_time_and_again_is_spent() -> None:
    cost = Bench().cost()
    for _ in range(10):
        cost.failed()
        for _ in range(30):
            cost.charge(0.0001)
    assert not cost.is_spent
    for _ in range(11):
        cost.failed()
    assert cost.is_spent
