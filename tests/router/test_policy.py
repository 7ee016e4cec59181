"""Properties of routing decisions under any load, and the spread of bursts."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.errors import NoGroupAvailable
from quire.router.policies.decide import decide
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Decision, GroupState, Policy, RouteRequest
from quire.router.prefix_index.directory import GroupId
from quire.simulate.baselines import SIMULATED_POLICIES
from quire.worker.blocks.hashing import BlockHash

Blocks = Callable[[Iterable[object]], tuple[BlockHash, ...]]
BLOCK_SIZE = 16

group_states = st.lists(
    st.builds(
        GroupState,
        group=st.sampled_from([GroupId(name) for name in "abcdefgh"]),
        num_running=st.integers(0, 200),
        num_waiting=st.integers(0, 50),
        num_pending_prefill_tokens=st.integers(0, 100_000),
        num_available_blocks=st.none() | st.integers(0, 10_000),
        num_reserved_requests=st.integers(0, 20),
        num_reserved_tokens=st.integers(0, 20_000),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda state: state.group,
)
requests = st.builds(
    RouteRequest,
    hashes=st.lists(st.binary(min_size=32, max_size=32).map(BlockHash), max_size=3),
    num_prompt_tokens=st.integers(1, 10_000),
    block_size=st.just(BLOCK_SIZE),
    exclude=st.frozensets(st.sampled_from([GroupId(name) for name in "abcd"])),
    ordinal=st.integers(0, 2**40),
)
overlaps = st.dictionaries(
    st.sampled_from([GroupId(name) for name in "abcdefgh"]), st.integers(0, 600)
)
SLOW = ("random", "ray_prefix")
every_policy = pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in SIMULATED_POLICIES
    ],
)


def route(
    request: RouteRequest,
    groups: list[GroupState],
    overlap: dict[GroupId, int],
    *,
    policy: str = "prefix_aware",
) -> Decision:
    """The decision of a policy without history."""
    lengths = [overlap.get(s.group, 0) for s in groups]
    return decide(SIMULATED_POLICIES[policy](), request, Loads(groups), lengths)


def request(blocks: Blocks, name: object, *, num_tokens: int) -> RouteRequest:
    hashes = blocks((name, i) for i in range(num_tokens // BLOCK_SIZE))
    return RouteRequest(hashes=hashes, num_prompt_tokens=num_tokens, block_size=BLOCK_SIZE)


def idle(*names: str) -> list[GroupState]:
    return [GroupState(group=GroupId(name)) for name in names]


@pytest.mark.quick_cells("prefix_aware", "round_robin", "least_loaded", "power_of_two")
@every_policy
@given(request=requests, groups=group_states, overlap=overlaps)
def test_an_excluded_group_is_never_chosen_and_the_order_of_groups_never_matters(
    policy: str,
    request: RouteRequest,
    groups: list[GroupState],
    overlap: dict[GroupId, int],
) -> None:
    allowed = {state.group for state in groups} - request.exclude
    if not allowed:
        with pytest.raises(NoGroupAvailable, match=f"{len(groups)} known"):
            route(request, groups, overlap, policy=policy)
        return
    decision = route(request, groups, overlap, policy=policy)
    assert decision.group in allowed
    assert {candidate.group for candidate in decision.candidates} == allowed
    assert decision.reason == "only_group" or len(allowed) > 1
    chosen = next(c for c in decision.candidates if c.group == decision.group)
    assert decision.predicted_cached_tokens == chosen.num_cached_tokens
    assert route(request, groups[::-1], overlap, policy=policy).group == decision.group


@given(request=requests, groups=group_states, overlap=overlaps)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(
    request: RouteRequest, groups: list[GroupState], overlap: dict[GroupId, int]
) -> None:
    decision = route(replace(request, exclude=frozenset()), groups, overlap)
    for candidate in decision.candidates:
        assert candidate.num_cached_tokens % BLOCK_SIZE == 0
        assert candidate.num_cached_tokens < request.num_prompt_tokens
        assert candidate.num_cached_tokens <= overlap.get(candidate.group, 0) * BLOCK_SIZE


@given(
    request=requests,
    load=group_states.map(lambda groups: groups[0]),
    overlap=st.lists(st.integers(0, 600), min_size=2, max_size=6),
)
def test_the_longest_prefix_wins_at_equal_load(
    request: RouteRequest, load: GroupState, overlap: list[int]
) -> None:
    names = [GroupId(f"group-{i}") for i in range(len(overlap))]
    decision = route(
        request,
        [replace(load, group=name) for name in names],
        dict(zip(names, overlap, strict=True)),
    )
    assert decision.predicted_cached_tokens == max(
        candidate.num_cached_tokens for candidate in decision.candidates
    )


@given(request=requests, groups=group_states, overlap=overlaps, more=st.integers(1, 50))
def test_a_longer_prefix_never_loses_a_group_the_request(
    request: RouteRequest, groups: list[GroupState], overlap: dict[GroupId, int], more: int
) -> None:
    request = replace(request, exclude=frozenset())
    chosen = route(request, groups, overlap).group
    longer = {**overlap, chosen: overlap.get(chosen, 0) + more}
    assert route(request, groups, longer).group == chosen


def test_a_tie_goes_to_the_same_group_for_the_same_prefix_and_spreads_over_prefixes(
    blocks: Blocks,
) -> None:
    groups = idle("a", "b", "c", "d")
    chosen = [route(request(blocks, i, num_tokens=64), groups, {}) for i in range(100)]
    assert {decision.reason for decision in chosen} == {"least_loaded"}
    counts = {name: sum(d.group == name for d in chosen) for name in "abcd"}
    assert min(counts.values()) > 10
    # Losing a group moves only that group's prefixes.
    for i, decision in enumerate(chosen):
        if decision.group != "d":
            again = route(request(blocks, i, num_tokens=64), groups[:3], {})
            assert again.group == decision.group


def test_prompts_without_a_full_block_spread(blocks: Blocks) -> None:
    short = request(blocks, "short", num_tokens=5)
    chosen = {route(replace(short, ordinal=i), idle("a", "b"), {}).group for i in range(20)}
    assert chosen == {"a", "b"}


def test_the_reason_says_what_decided(blocks: Blocks) -> None:
    prompt = request(blocks, "p", num_tokens=1024)
    groups = idle("a", "b")
    assert route(prompt, groups[:1], {}).reason == "only_group"
    assert route(prompt, groups, {GroupId("a"): 9}).reason == "cached_prefix"
    busy = [replace(groups[0], num_pending_prefill_tokens=10**6), groups[1]]
    decision = route(prompt, busy, {GroupId("a"): 64, GroupId("b"): 1})
    assert (decision.group, decision.reason) == ("b", "least_loaded")


def test_a_prefix_is_worth_waiting_for_until_the_queue_is_longer_than_what_it_saves(
    blocks: Blocks,
) -> None:
    prompt = request(blocks, "p", num_tokens=1024)
    overlap = {GroupId("a"): 64}
    for queued, expected in ((0, "a"), (500, "a"), (2500, "b")):
        a = GroupState(group=GroupId("a"), num_pending_prefill_tokens=queued)
        assert route(prompt, [a, *idle("b")], overlap).group == expected


def test_a_fully_cached_prompt_still_computes_its_last_block(blocks: Blocks) -> None:
    prompt = request(blocks, "p", num_tokens=64)
    assert route(prompt, idle("a", "b"), {GroupId("a"): 4}).predicted_cached_tokens == 48


def test_among_ties_one_block_more_decides_for_every_prefix(blocks: Blocks) -> None:
    for i in range(10):
        prompt = request(blocks, i, num_tokens=64)
        decision = route(prompt, idle("a", "b"), {GroupId("a"): 2, GroupId("b"): 1})
        assert decision.group == "a"


def queued(name: str, num_tokens: int) -> GroupState:
    return GroupState(group=GroupId(name), num_pending_prefill_tokens=num_tokens)


def test_a_prefix_is_copied_while_there_is_time_and_stays_where_it_is_under_pressure(
    blocks: Blocks,
) -> None:
    prompt, overlap = request(blocks, "p", num_tokens=1024), {GroupId("a"): 64}
    assert route(prompt, [queued("a", 2500), queued("b", 0)], overlap).group == "b"
    # The queue is shorter by as much, but other requests wait in it.
    assert route(prompt, [queued("a", 10_500), queued("b", 8000)], overlap).group == "a"


def test_queues_elsewhere_do_not_keep_a_request_from_an_idle_group(blocks: Blocks) -> None:
    """Sessions had piled up on some groups and stayed, since queues elsewhere made copies dear."""
    prompt = request(blocks, "p", num_tokens=10_240)
    home, idle_one = queued("home", 60_000), queued("idle", 0)
    others = [queued(name, 30_000) for name in "abcdef"]
    policy = SIMULATED_POLICIES["prefix_aware"]()
    for second in range(60):
        # The result must not change over time.
        now = replace(prompt, now_s=float(second))
        decision = decide(policy, now, Loads([home, *others, idle_one]), [640, *[0] * 7])
        assert decision.group == "idle"


def after_requests_that_bring(num_tokens: int) -> Policy:
    """Our policy after many requests with a cached beginning and ``num_tokens`` new tokens."""
    policy = SIMULATED_POLICIES["prefix_aware"]()
    asked = RouteRequest(hashes=(), num_prompt_tokens=100_000, block_size=BLOCK_SIZE)
    for _ in range(1000):
        policy.costs(asked, Loads(idle("a", "b")), np.array([0.0, 100_000 - num_tokens]))
    return policy


def test_a_long_prefix_waits_for_its_group_longer_than_many_short_ones(blocks: Blocks) -> None:
    """Computing a long prefix elsewhere would block that group; short ones would not."""
    for num_tokens, expected in ((1024, "b"), (16_384, "a")):
        prompt = request(blocks, "p", num_tokens=num_tokens)
        policy, cached = after_requests_that_bring(500), num_tokens // BLOCK_SIZE
        groups = [queued("a", 2 * num_tokens), *idle("b")]
        assert decide(policy, prompt, Loads(groups), [cached, 0]).group == expected


def test_a_queue_is_of_more_requests_where_each_brings_less(blocks: Blocks) -> None:
    """A duplicate computation then delays more requests."""
    prompt, groups = request(blocks, "p", num_tokens=1024), [queued("a", 7000), queued("b", 3000)]
    for num_tokens, expected in ((100, "a"), (10_000, "b")):
        policy = after_requests_that_bring(num_tokens)
        assert decide(policy, prompt, Loads(groups), [64, 0]).group == expected


def test_a_decision_explains_itself(blocks: Blocks) -> None:
    prompt = request(blocks, "p", num_tokens=1024)
    groups = [GroupState(group=GroupId("a"), num_reserved_tokens=100), *idle("b")]
    decision = route(prompt, groups, {GroupId("a"): 10})
    a, b = decision.candidates
    assert (a.num_cached_tokens, a.num_prefill_tokens, a.num_queued_tokens) == (160, 864, 100)
    assert (b.num_cached_tokens, b.num_prefill_tokens, b.num_queued_tokens) == (0, 1024, 0)
    assert decision.group == min(decision.candidates, key=lambda c: c.cost).group


def test_round_robin_takes_turns(blocks: Blocks) -> None:
    prompt = request(blocks, "p", num_tokens=64)
    turns = [
        route(replace(prompt, ordinal=i), idle("b", "a"), {}, policy="round_robin").group
        for i in range(4)
    ]
    assert turns == ["a", "b", "a", "b"]
