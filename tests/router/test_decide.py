"""Decisions computed on arrays equal those of a loop over groups."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.router.plain_policy import WrittenOut

from quire.router.errors import NoGroupAvailable
from quire.router.policies.decide import TIE_TOKENS, decide
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupState, RouteRequest
from quire.router.policies.prefix_aware import PrefixAware, PrefixAwareConfig
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash

GROUPS = [GroupId(f"group-{number}") for number in range(12)]
PROMPTS = [
    [BlockHash(hashlib.sha256(bytes([first, i])).digest()) for i in range(8)] for first in (1, 2)
]
few_numbers = st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 1000, 4096, 100_000])
"""Numbers among which equal costs, and ones that differ by a tie's width, are common."""
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
)
changes: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"num_reserved_requests": 1}, {"num_reserved_tokens": 32}]
)


@st.composite
def alike(draw: st.DrawFn) -> list[GroupState]:
    """Groups, some of whose costs differ by exactly a tie's width."""
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


@given(request=routed, groups=clusters, data=st.data())
@settings(max_examples=examples(400))
def test_a_decision_is_the_one_of_the_formula_written_out_for_each_group(
    request: RouteRequest, groups: list[GroupState], data: st.DataObject
) -> None:
    lengths = st.sampled_from([0, 0, 1, 2, 3, 8]) | st.integers(0, 600)
    overlap = data.draw(st.lists(lengths, min_size=len(groups), max_size=len(groups)))
    cached = [data.draw(st.integers(0, length)) for length in overlap]
    policy, plain, loads = PrefixAware(), WrittenOut(), Loads(groups)
    if {state.group for state in groups} <= request.exclude:
        with pytest.raises(NoGroupAvailable):
            decide(policy, request, loads, overlap)
        return
    for _ in range(data.draw(st.sampled_from([6, 60]))):
        decision = decide(policy, request, loads, overlap, cached)
        hits, names = [int(hit) for hit in decision.cached], [state.group for state in groups]
        known = [cached[names.index(state.group)] for state in decision.groups]
        assert decision.index == plain.chosen(request, decision.groups, hits, known)
        assert list(decision.costs) == plain.last_costs


def test_a_tie_of_all_groups_goes_where_the_name_of_the_prefix_says() -> None:
    groups = [GroupState(group=group) for group in GROUPS]
    request = RouteRequest(hashes=PROMPTS[0], num_prompt_tokens=130, block_size=16)

    def distance(group: GroupId) -> bytes:
        return hashlib.blake2b(group.encode(), key=PROMPTS[0][0], digest_size=8).digest()

    decision = decide(PrefixAware(), request, Loads(groups), np.zeros(len(groups), dtype=np.int64))
    assert decision.group == min(GROUPS, key=distance)


WIDE = PrefixAwareConfig(request_tokens=TIE_TOKENS)


def test_costs_that_are_just_as_wide_as_a_tie_apart_are_tied() -> None:
    a, b = (GroupState(group=group) for group in GROUPS[:2])
    for number in range(16):
        name = BlockHash(bytes([number]) * 32)
        request = RouteRequest(hashes=[name], num_prompt_tokens=17, block_size=16)
        tied = Loads([a, replace(b, num_reserved_requests=1)])
        equal, held = Loads([a, b]), np.zeros(2, dtype=np.int64)
        first, second = (decide(PrefixAware(WIDE), request, loads, held) for loads in (equal, tied))
        assert first.group == second.group
        assert abs(second.costs[0] - second.costs[1]) == 32


def test_what_groups_hold_is_known_when_others_come_and_go() -> None:
    table = RoutingTable(block_size=16)
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
    decision = decide(PrefixAware(), request, loads, np.zeros(12, dtype=np.int64))
    before = decision.candidates
    for position, group in enumerate(GROUPS):
        loads.put(position, GroupState(group=group, num_running=9, num_reserved_tokens=99))
    assert decision.candidates == before
    assert {candidate.num_queued_tokens for candidate in before} == {0}
