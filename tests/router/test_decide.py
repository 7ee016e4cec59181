"""A decision among many groups at once is the one that looking at each in turn takes."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from tests.router.plain_policy import WrittenOut

from quire.router.config import RoutingConfig
from quire.router.errors import NoGroupAvailable
from quire.router.policies.decide import TIE_TOKENS, decide, decide_among_many
from quire.router.policies.loads import Loads
from quire.router.policies.pace import Pace
from quire.router.policies.policy import Decision, GroupState, RouteRequest
from quire.router.policies.prefix_aware import PrefixAware, PrefixAwareConfig
from quire.router.prefix_index.directory import GroupId
from quire.router.table import GroupLoad, RoutingTable
from quire.worker.api.events import BlocksRemoved, BlocksStored, EventBatch
from quire.worker.api.hashing import BlockHash

GROUPS = [GroupId(f"group-{number}") for number in range(12)]
PROMPTS = [
    [BlockHash(hashlib.sha256(bytes([first, i])).digest()) for i in range(8)] for first in (1, 2)
]
few_numbers = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 1000, 4096, 100_000])
"""Costs that are equal or differ by a tie's width are not rare."""
states = st.builds(
    GroupState,
    group=st.sampled_from(GROUPS),
    num_running=few_numbers,
    num_waiting=few_numbers,
    num_pending_prefill_tokens=few_numbers,
    num_reserved_requests=few_numbers,
    num_reserved_tokens=few_numbers,
    step_began_s=st.sampled_from([0.0, 9.0, 9.9, 9.95, 10.0, 10.1]) | st.floats(9, 10.5),
    step_s=st.sampled_from([0.0, 0.05, 0.1, 0.2]) | st.floats(0.001, 1.0),
    num_step_tokens=few_numbers,
    pace=st.none() | st.builds(Pace, *[st.floats(0, 1)] * 4),
)
changes: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"num_reserved_requests": 1}, {"num_reserved_tokens": 32}]
)


@st.composite
def alike(draw: st.DrawFn) -> list[GroupState]:
    """Groups of which some are exactly as wide as a tie apart."""
    state = draw(states)
    return [replace(state, group=group, **draw(changes)) for group in GROUPS[:5]]


clusters = alike() | st.lists(states, min_size=1, max_size=12, unique_by=lambda state: state.group)
routed = st.builds(
    RouteRequest,
    hashes=st.sampled_from([[], *PROMPTS]),
    num_prompt_tokens=st.sampled_from([1, 16, 17, 64, 129, 4000, 100_000]) | st.integers(1, 9000),
    block_size=st.just(16),
    exclude=st.frozensets(st.sampled_from(GROUPS), max_size=3),
    ordinal=st.integers(0, 2**40),
    now_s=st.just(10.0),
)


def assert_same(one: Decision, other: Decision) -> None:
    """To the last bit, as far as anyone can see it."""
    for name in ("group", "reason", "predicted_cached_tokens", "index", "forecast_s", "candidates"):
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.groups) == list(other.groups)


@given(request=routed, groups=clusters, data=st.data())
@settings(max_examples=400)
def test_many_at_once_are_decided_as_one_by_one(
    request: RouteRequest, groups: list[GroupState], data: st.DataObject
) -> None:
    lengths = st.sampled_from([0, 0, 1, 2, 3, 8]) | st.integers(0, 600)
    overlap = data.draw(st.lists(lengths, min_size=len(groups), max_size=len(groups)))
    each, together, plain = PrefixAware(), PrefixAware(), WrittenOut()
    loads, array = Loads(groups), np.array(overlap, dtype=np.int64)
    if {state.group for state in groups} <= request.exclude:
        with pytest.raises(NoGroupAvailable) as in_turn:
            decide(each, request, groups, overlap)
        with pytest.raises(NoGroupAvailable) as at_once:
            decide_among_many(together, request, loads, array)
        assert str(in_turn.value) == str(at_once.value)
        return
    for _ in range(data.draw(st.sampled_from([6, 60]))):
        expected = decide(each, request, groups, overlap)
        decision = decide_among_many(together, request, loads, array)
        assert_same(decision, expected)
        assert together.pressure == each.pressure
        hits = [int(hit) for hit in expected.hits]
        assert expected.index == plain.chosen(request, expected.groups, hits)
        assert list(expected.costs) == plain.last_costs


def test_a_tie_of_all_groups_goes_where_the_name_of_the_prefix_says() -> None:
    groups = [GroupState(group=group) for group in GROUPS]
    request = RouteRequest(hashes=PROMPTS[0], num_prompt_tokens=130, block_size=16)

    def distance(group: GroupId) -> bytes:
        return hashlib.blake2b(group.encode(), key=PROMPTS[0][0], digest_size=8).digest()

    decision = decide_among_many(
        PrefixAware(), request, Loads(groups), np.zeros(len(groups), dtype=np.int64)
    )
    assert decision.group == min(GROUPS, key=distance)


WIDE = PrefixAwareConfig(request_tokens=TIE_TOKENS)


def test_costs_that_are_just_as_wide_as_a_tie_apart_are_tied() -> None:
    a, b = (GroupState(group=group) for group in GROUPS[:2])
    for number in range(16):
        name = BlockHash(bytes([number]) * 32)
        request = RouteRequest(hashes=[name], num_prompt_tokens=17, block_size=16)
        tied = Loads([a, replace(b, num_reserved_requests=1)])
        equal, held = Loads([a, b]), np.zeros(2, dtype=np.int64)
        first, second = (
            decide_among_many(PrefixAware(WIDE), request, loads, held) for loads in (equal, tied)
        )
        assert first.group == second.group
        assert abs(second.costs[0] - second.costs[1]) == 32


@pytest.mark.parametrize("many", [1, 10**9])
def test_what_groups_hold_is_known_when_others_come_and_go(many: int) -> None:
    table = RoutingTable(block_size=16, many=many)
    prompt, (first, second, third) = PROMPTS[0], GROUPS[:3]
    table.update_members([first, second])
    for group, num_blocks in ((first, 2), (second, 5)):
        events = (BlocksStored(prompt[:num_blocks]),)
        table.apply_events(group, EventBatch(epoch=1, first_seq=0, events=events))
    for members in ([first, second, third], [third, second], [second]):
        table.update_members(members)
        decision = table.route("r", hashes=prompt, num_prompt_tokens=130)
        assert (decision.group, decision.predicted_cached_tokens) == (second, 80)
        assert table.stats().num_in_flight_blocks == 3
    table.update_members([first, second])
    decision = table.route("r", hashes=prompt, num_prompt_tokens=130, exclude=frozenset([second]))
    assert (decision.group, decision.predicted_cached_tokens) == (first, 0)
    assert table.stats().num_in_flight_blocks == 8


def test_a_decision_keeps_the_loads_as_they_were() -> None:
    loads = Loads([GroupState(group=group) for group in GROUPS])
    request = RouteRequest(hashes=(), num_prompt_tokens=130, block_size=16)
    decision = decide_among_many(PrefixAware(), request, loads, np.zeros(12, dtype=np.int64))
    before = decision.candidates
    for position, group in enumerate(GROUPS):
        loads.put(position, GroupState(group=group, num_running=9, num_reserved_tokens=99))
    assert decision.candidates == before
    assert {candidate.num_queued_tokens for candidate in before} == {0}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TwinMachine(RuleBasedStateMachine):
    """Two tables are told the same; one looks at its groups at once, one at each in turn."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        config = RoutingConfig(max_in_flight=8, max_in_flight_blocks=40, stale_after_s=5)
        self.tables = [
            RoutingTable(
                block_size=16,
                config=config,
                clock=self.clock,
                wall_clock=self.clock,
                many=many,
            )
            for many in (3, 10**9)
        ]
        self.next_id = 0
        self.change_members(set(GROUPS[:4]))

    @rule(
        target=requests,
        prompt=st.sampled_from(PROMPTS),
        num_blocks=st.integers(0, 8),
        exclude=st.frozensets(st.sampled_from(GROUPS[:6]), max_size=2),
    )
    def route(self, prompt: list[BlockHash], num_blocks: int, exclude: frozenset[GroupId]) -> str:
        self.next_id += 1
        self.send(str(self.next_id), prompt[:num_blocks], exclude)
        return str(self.next_id)

    @rule(request_id=requests, prompt=st.sampled_from(PROMPTS))
    def route_again(self, request_id: str, prompt: list[BlockHash]) -> None:
        self.send(request_id, prompt, frozenset())

    def send(self, request_id: str, hashes: list[BlockHash], exclude: frozenset[GroupId]) -> None:
        decisions = []
        for table in self.tables:
            try:
                decision = table.route(
                    request_id,
                    hashes=hashes,
                    num_prompt_tokens=16 * len(hashes) + 1,
                    exclude=exclude,
                )
            except NoGroupAvailable:
                continue
            decisions.append(decision)
        assert len(decisions) in (0, 2)
        if decisions:
            at_once, in_turn = decisions
            # Members are in no particular order, though here in the same one.
            assert_same(at_once, in_turn)

    @rule(request_id=requests, num_cached=st.sampled_from([0, 16]))
    def start(self, request_id: str, num_cached: int) -> None:
        for table in self.tables:
            table.started(request_id, num_cached_tokens=num_cached)

    @rule(request_id=requests)
    def complete(self, request_id: str) -> None:
        for table in self.tables:
            table.completed(request_id)

    @rule(
        group=st.sampled_from(GROUPS[:6]),
        running=st.integers(0, 3),
        pending=st.sampled_from([0, 32, 5000]),
        step=st.integers(0, 40),
    )
    def frame(self, group: GroupId, running: int, pending: int, step: int) -> None:
        load = GroupLoad(
            num_running=running,
            num_waiting=0,
            num_pending_prefill_tokens=pending,
            num_available_blocks=100,
            num_steps=step,
        )
        for table in self.tables:
            table.update_load(group, load)

    @rule(
        group=st.sampled_from(GROUPS[:6]),
        prompt=st.sampled_from(PROMPTS),
        num_blocks=st.integers(1, 8),
        is_stored=st.booleans(),
    )
    def event(
        self, group: GroupId, prompt: list[BlockHash], num_blocks: int, is_stored: bool
    ) -> None:
        event = BlocksStored(prompt[:num_blocks]) if is_stored else BlocksRemoved(prompt[-1:])
        for table in self.tables:
            position = table.events_position(group)
            batch = EventBatch(epoch=1, first_seq=position.next_seq, events=(event,))
            table.apply_events(group, batch)

    @rule(group=st.sampled_from(GROUPS[:6]))
    def join_or_leave(self, group: GroupId) -> None:
        self.change_members(self.members ^ {group})

    def change_members(self, members: set[GroupId]) -> None:
        self.members = members
        for table in self.tables:
            table.update_members(members)

    @rule(seconds=st.sampled_from([0.01, 0.05, 1, 6, 61]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        for table in self.tables:
            table.expire()

    @invariant()
    def they_know_the_same(self) -> None:
        one, other = (table.states() for table in self.tables)
        assert one == other
        assert self.tables[0].stats() == self.tables[1].stats()


TestTwins = TwinMachine.TestCase
TestTwins.settings = settings(max_examples=80, stateful_step_count=40)
