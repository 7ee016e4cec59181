import gc
import tracemalloc
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.examples import examples

from quire.router.decision_log import MAX_OUTCOME_CHARS, DecisionLog
from quire.router.policies.decide import decide
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Decision, GroupState, RouteRequest
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.prefix_index.directory import GroupId


def decision_of(num_groups: int) -> Decision:
    # As large as in a busy cluster, so that no number is a cached small integer of the interpreter.
    states = [
        GroupState(
            group=GroupId(f"g{number}"),
            num_pending_prefill_tokens=1000 + number,
            num_available_blocks=100_000 + number,
            num_blocks=200_000,
            num_reserved_tokens=300 + number,
        )
        for number in range(num_groups)
    ]
    request = RouteRequest(hashes=(), num_prompt_tokens=1000, block_size=16)
    return decide(
        PrefixAware(), request, Loads(states), [20 + number for number in range(num_groups)]
    )


def add(log: DecisionLog, request_id: str, *, num_groups: int = 2, client_id: str = "") -> None:
    log.add(
        request_id,
        decision_of(num_groups),
        client_id=client_id,
        decided_at_s=1e9,
        policy="prefix_aware",
        pressure=0.0,
    )


def test_a_request_is_found_by_its_name_its_completions_and_its_clients_name() -> None:
    log = DecisionLog(max_decisions=10, max_candidates=100)
    add(log, "a1-0", client_id="mine")
    add(log, "a1-1", client_id="mine")
    add(log, "a2-0")
    assert [each.request_id for each in log.find("a1-1")] == ["a1-1"]
    assert [each.request_id for each in log.find("a1")] == ["a1-0", "a1-1"]
    assert [each.request_id for each in log.find("mine")] == ["a1-0", "a1-1"]
    assert log.find("a") == log.find("a1-") == []
    assert [each.request_id for each in log.recent(2)] == ["a2-0", "a1-1"]


def test_attempts_are_kept_apart_with_what_came_of_each() -> None:
    log = DecisionLog(max_decisions=10, max_candidates=100)
    add(log, "r-0")
    log.ended("r-0", "moved: " + "x" * 1000)
    add(log, "r-0")
    log.started("r-0", num_cached_tokens=32, waited_s=0.5)
    log.ended("r-0", "stop")
    log.ended("r-0", "too late")
    first, second = log.find("r-0")
    assert (first.attempt, first.num_cached_tokens, first.waited_s) == (1, None, None)
    assert first.outcome.startswith("moved: x")
    assert len(first.outcome) == MAX_OUTCOME_CHARS
    assert (second.attempt, second.num_cached_tokens, second.waited_s) == (2, 32, 0.5)
    assert second.outcome == "stop"


def test_what_was_handed_out_does_not_change() -> None:
    log = DecisionLog(max_decisions=10, max_candidates=100)
    add(log, "r-0")
    (before,) = log.find("r-0")
    log.ended("r-0", "stop")
    assert before.outcome == ""


def test_a_log_of_nothing_keeps_nothing() -> None:
    log = DecisionLog(max_decisions=0, max_candidates=100)
    add(log, "r-0")
    assert log.recent(5) == log.find("r-0") == []


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [4, 512])
def test_memory_is_bounded_however_many_groups_there_are(num_groups: int) -> None:
    log = DecisionLog(max_decisions=1024, max_candidates=32_768)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1100 if num_groups < 10 else 70):
            add(log, f"request-{number}-0", num_groups=num_groups)
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # 400 bytes a candidate, as the configuration says, and some for each decision.
    assert num_bytes < 400 * log.num_candidates + 1500 * log.num_decisions
    assert log.num_candidates <= 32_768


class LogMachine(RuleBasedStateMachine):
    """The decision log, compared with a list of all decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.log = DecisionLog(max_decisions=5, max_candidates=12)
        self.all: deque[tuple[str, int, list[str]]] = deque()

    @rule(request=st.integers(0, 4), num_groups=st.integers(1, 7))
    def add(self, request: int, num_groups: int) -> None:
        add(self.log, str(request), num_groups=num_groups)
        self._last_ended(request, "moved")
        self.all.append((str(request), num_groups, []))

    @rule(request=st.integers(0, 4), outcome=st.sampled_from(["stop", "error"]))
    def end(self, request: int, outcome: str) -> None:
        self.log.ended(str(request), outcome)
        self._last_ended(request, outcome)

    def _last_ended(self, request: int, outcome: str) -> None:
        mine = [each for each in self.all if each[0] == str(request)]
        if mine and not mine[-1][2]:
            mine[-1][2].append(outcome)

    @invariant()
    def the_newest_that_fit_are_kept(self) -> None:
        kept: list[tuple[str, int, list[str]]] = []
        for each in reversed(self.all):
            if len(kept) == 5 or (kept and sum(k[1] for k in kept) + each[1] > 12):
                break
            kept.append(each)
        found = self.log.recent(100)
        assert [(e.request_id, len(e.decision.groups)) for e in found] == [k[:2] for k in kept]
        assert [e.outcome for e in found] == ["".join(k[2]) for k in kept]
        assert self.log.num_candidates == sum(k[1] for k in kept)


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=examples(60), stateful_step_count=30)
