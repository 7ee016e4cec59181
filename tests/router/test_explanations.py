"""A table's explanations of past decisions, and what it learns from their results."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from quire.router.config import RoutingConfig
from quire.router.errors import NoGroupAvailable, UnknownDecision
from quire.router.policies.catalog import POLICIES
from quire.router.policies.policy import GroupLoad
from quire.router.policies.speeds import MIN_OBSERVATIONS
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError

Blocks = Callable[[Iterable[object]], tuple[BlockHash, ...]]
A, B = GroupId("a"), GroupId("b")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def table_of(*groups: GroupId, clock: Clock | None = None, **settings: object) -> RoutingTable:
    table = RoutingTable(
        block_size=16,
        config=RoutingConfig(**settings),  # type: ignore[arg-type]
        clock=clock or Clock(),
        wall_clock=lambda: 1.7e9,
    )
    table.update_members(groups)
    return table


def test_a_decision_is_told_with_its_candidates_and_what_came_of_it(blocks: Blocks) -> None:
    clock = Clock()
    table = table_of(A, B, clock=clock)
    prompt = blocks(range(8))
    table.apply_events(A, EventBatch(epoch=1, first_seq=0, events=(BlocksStored(prompt[:6]),)))
    table.update_load(
        B,
        GroupLoad(
            num_running=3, num_waiting=1, num_pending_prefill_tokens=500, num_available_blocks=9
        ),
    )
    table.route("r-0", hashes=prompt, num_prompt_tokens=130, client_id="mine")
    (under_way,) = table.explain("r-0")
    assert (under_way.outcome, under_way.waited_s) == ("", None)
    clock.now_s = 0.25
    table.started("r-0", num_cached_tokens=80)
    table.completed("r-0", outcome="stop")
    (found,) = table.explain("mine")
    a, b = sorted(found.decision.candidates, key=lambda each: each.group)
    assert (found.decision.group, found.decision.reason) == ("a", "cached_prefix")
    assert (a.num_cached_tokens, a.num_prefill_tokens, a.num_queued_tokens) == (96, 34, 0)
    assert (b.num_cached_tokens, b.num_queued_tokens, b.num_sequences) == (0, 500, 4)
    assert a.cost < b.cost
    assert (found.policy, found.decided_at_s) == ("prefix_aware", 1.7e9)
    assert (found.num_cached_tokens, found.waited_s, found.outcome) == (80, 0.25, "stop")


def test_a_request_that_was_moved_is_told_attempt_by_attempt() -> None:
    table = table_of(A, B)
    first = table.route("r-0", hashes=(), num_prompt_tokens=10).group
    table.route(
        "r-0",
        hashes=(),
        num_prompt_tokens=12,
        exclude=frozenset({first}),
        moved_because="its queue is full",
    )
    table.completed("r-0", outcome="length")
    attempts = table.explain("r-0")
    assert [each.attempt for each in attempts] == [1, 2]
    assert [each.outcome for each in attempts] == ["moved: its queue is full", "length"]
    assert [candidate.group for candidate in attempts[1].decision.candidates] == [
        ({A, B} - {first}).pop()
    ]


def test_a_request_that_finds_no_other_group_is_not_told_to_have_moved() -> None:
    table = table_of(A)
    table.route("r-0", hashes=(), num_prompt_tokens=10)
    with pytest.raises(NoGroupAvailable):
        table.route("r-0", hashes=(), num_prompt_tokens=12, exclude=frozenset({A}))
    assert [each.outcome for each in table.explain("r-0")] == [""]
    table.completed("r-0", outcome="error: no group")
    assert [each.outcome for each in table.explain("r-0")] == ["error: no group"]


def test_what_is_not_known_says_how_many_are_kept() -> None:
    table = table_of(A, max_decisions_kept=3)
    for number in range(5):
        table.route(str(number), hashes=(), num_prompt_tokens=10)
    assert [each.request_id for each in table.recent(10)] == ["4", "3", "2"]
    for name in ("1", "nothing", ""):
        with pytest.raises(
            UnknownDecision, match=f"request_id='{name}'.*only the last ones are kept"
        ):
            table.explain(name)


def test_the_explained_pressure_is_the_one_of_that_decision() -> None:
    clock = Clock()
    table = table_of(A, B, clock=clock)
    pressures = []
    for number in range(20):
        clock.now_s += 5
        table.route(str(number), hashes=(), num_prompt_tokens=1_000_000)
        (found,) = table.explain(str(number))
        pressures.append(found.pressure)
    assert pressures[0] == 0
    assert pressures[-1] == 12  # Nothing is ever computed: both groups are always busy.


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policys_decisions_can_be_explained(policy: str) -> None:
    table = table_of(A, B, policy=policy)
    decision = table.route("r", hashes=(), num_prompt_tokens=100)
    (found,) = table.explain("r")
    assert found.policy == policy
    chosen = next(c for c in found.decision.candidates if c.group == decision.group)
    assert chosen.cost == min(c.cost for c in found.decision.candidates)


def test_waits_teach_forecasts_and_their_errors_are_counted() -> None:
    clock = Clock()
    table = table_of(A, clock=clock)

    def serve(name: str, num_tokens: int, *, slow: float = 1.0) -> None:
        decision = table.route(name, hashes=(), num_prompt_tokens=num_tokens)
        forecasts.append(decision.forecast_s)
        clock.now_s += slow * (0.01 + 0.001 * num_tokens)
        table.started(name, num_cached_tokens=0)
        table.completed(name)

    forecasts: list[float | None] = []
    for number in range(100):
        serve(str(number), 100 + 37 * (number % 10))
    assert forecasts[:MIN_OBSERVATIONS] == [None] * MIN_OBSERVATIONS
    assert forecasts[99] == pytest.approx(0.01 + 0.001 * (100 + 37 * 9), rel=0.01)
    accuracy = table.stats().accuracy
    assert accuracy.num_forecasts == 100 - MIN_OBSERVATIONS
    assert sum(accuracy.errors_ratio.counts) == sum(accuracy.errors_s.counts) == 92
    assert accuracy.forecast_s == pytest.approx(accuracy.waited_s, rel=0.02)
    before = table.stats().forecasts[A].mean_error
    assert before is not None
    assert before < 0.02

    serve("late", 100, slow=10)
    accuracy = table.stats().accuracy
    # Forecast 0.11 s, waited 1.1 s: off by 0.99 s, nine tenths of the wait.
    seconds, ratio = accuracy.errors_s, accuracy.errors_ratio
    assert seconds.counts[seconds.bounds.index(1.0)] == 1
    assert ratio.counts[ratio.bounds.index(1.0)] == 1
    after = table.stats().forecasts[A].mean_error
    assert after is not None
    assert after > before


def test_without_a_directory_forecasts_expect_what_is_usually_found_in_spite_of_it() -> None:
    clock = Clock()
    config = RoutingConfig(use_directory=False)
    table = RoutingTable(block_size=16, config=config, clock=clock)
    table.update_members([A])
    forecast_s = None
    for i in range(50):
        num_tokens = 100 + 37 * (i % 10)
        decision = table.route(f"{i}", hashes=(), num_prompt_tokens=num_tokens)
        clock.now_s += 0.001 * num_tokens / 4
        table.started(f"{i}", num_cached_tokens=3 * num_tokens // 4)
        table.completed(f"{i}")
        forecast_s = decision.forecast_s
    assert forecast_s == pytest.approx(0.001 * (100 + 37 * 9) / 4, rel=0.02)


def test_a_slower_groups_forecasts_are_longer() -> None:
    clock = Clock()
    table = table_of(A, B, clock=clock)
    for number in range(200):
        name = str(number)
        group = table.route(name, hashes=(), num_prompt_tokens=100 + 10 * (number % 7)).group
        clock.now_s += (0.3 if group == A else 0.1) * (1 + 0.1 * (number % 7))
        table.started(name, num_cached_tokens=0)
        table.completed(name)
        # Requests go to the other group.
        other = str(number + 1000)
        table.route(
            other, hashes=(), num_prompt_tokens=100 + 10 * (number % 7), exclude=frozenset({group})
        )
        clock.now_s += (0.1 if group == A else 0.3) * (1 + 0.1 * (number % 7))
        table.started(other, num_cached_tokens=0)
        table.completed(other)
    decision = table.route("next", hashes=(), num_prompt_tokens=100)
    forecasts = {each.group: each.forecast_s for each in decision.candidates}
    assert forecasts[A] == pytest.approx(0.3, rel=0.02)
    assert forecasts[B] == pytest.approx(0.1, rel=0.02)


def test_a_group_that_comes_back_is_learned_anew() -> None:
    clock = Clock()
    table = table_of(A, clock=clock)
    for number in range(20):
        table.route(str(number), hashes=(), num_prompt_tokens=100)
        clock.now_s += 1
        table.started(str(number), num_cached_tokens=0)
    table.update_members([])
    table.update_members([A])
    assert table.route("r", hashes=(), num_prompt_tokens=100).forecast_s is None
    assert table.stats().forecasts[A].mean_error is None


def test_what_is_kept_may_be_nothing_but_not_less() -> None:
    table = table_of(A, max_decisions_kept=0)
    table.route("r", hashes=(), num_prompt_tokens=10)
    with pytest.raises(UnknownDecision):
        table.explain("r")
    with pytest.raises(ConfigError, match="max_decisions_kept=-1: must be 0 or more"):
        RoutingConfig(max_decisions_kept=-1)
