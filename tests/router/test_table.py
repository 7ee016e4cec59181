"""The routing table: a group's load and cache as estimated between two frames."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from tests.examples import examples

from quire.router.config import RoutingConfig
from quire.router.errors import NoGroupAvailable
from quire.router.policies.policy import GroupLoad, GroupState
from quire.router.prefix_index.directory import Applied, GroupId, NeedsResync, Position
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError

Blocks = Callable[[Iterable[object]], tuple[BlockHash, ...]]
A, B = GroupId("a"), GroupId("b")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def table_of(*groups: GroupId, clock: Clock | None = None, **limits: float) -> RoutingTable:
    config = RoutingConfig(**limits)  # type: ignore[arg-type]
    table = RoutingTable(block_size=16, config=config, clock=clock or Clock())
    table.update_members(groups)
    return table


def load(*, running: int = 0, pending: int = 0) -> GroupLoad:
    return GroupLoad(
        num_running=running,
        num_waiting=0,
        num_pending_prefill_tokens=pending,
        num_available_blocks=10_000,
    )


def state_of(table: RoutingTable, group: GroupId) -> GroupState:
    return next(state for state in table.states() if state.group == group)


def test_a_burst_of_equal_cold_prompts_shares_a_group_until_its_queue_is_long(
    blocks: Blocks,
) -> None:
    table = table_of(A, B)
    prompt = blocks(range(64))
    chosen = [table.route(str(i), hashes=prompt, num_prompt_tokens=1030).group for i in range(40)]
    first = chosen[0]
    assert chosen[:8] == [first] * 8
    assert set(chosen) == {A, B}
    # Requests that spilled over share their prefix at the other group.
    assert chosen.index(B if first == A else A) <= 20


def test_a_burst_of_different_cold_prompts_does_not_herd(blocks: Blocks) -> None:
    groups = [GroupId(name) for name in "abcd"]
    table = table_of(*groups)
    chosen = [
        table.route(str(i), hashes=blocks((i, j) for j in range(64)), num_prompt_tokens=1030).group
        for i in range(40)
    ]
    assert {chosen.count(group) for group in groups} == {10}


def test_how_much_of_a_prompt_no_group_has_is_learned_from_decisions(blocks: Blocks) -> None:
    table = table_of(A)
    assert table.num_to_compute(200) == 200
    for number in range(100):
        table.route(str(number), hashes=blocks(range(60)), num_prompt_tokens=1_000)
    # All but the first find 960 tokens in flight.
    assert table.num_to_compute(200) == pytest.approx(0.04 * 200, rel=0.15)


def test_without_a_directory_it_is_learned_from_what_groups_found(blocks: Blocks) -> None:
    table = RoutingTable(block_size=16, config=RoutingConfig(use_directory=False))
    table.update_members([A])
    for number in range(100):
        table.route(str(number), hashes=(), num_prompt_tokens=1_000)
        assert number or table.num_to_compute(200) == 200
        table.started(str(number), num_cached_tokens=750)
    assert table.num_to_compute(200) == pytest.approx(50, rel=0.05)


def test_a_reservation_counts_until_the_groups_frames_must_show_it(blocks: Blocks) -> None:
    table = table_of(A)
    table.route("r", hashes=blocks(range(4)), num_prompt_tokens=70)
    assert state_of(table, A).num_reserved_tokens == 70
    table.update_load(A, load())
    assert state_of(table, A).num_reserved_requests == 1
    table.update_load(A, load(running=1))
    state = state_of(table, A)
    assert (state.num_reserved_requests, state.num_reserved_tokens) == (0, 0)
    assert state.num_running == 1


def test_a_reservation_counts_until_a_frame_says_that_its_load_has_it(blocks: Blocks) -> None:
    table = table_of(A)
    for name in ("first", "second"):
        table.route(name, hashes=blocks(name), num_prompt_tokens=100)
    for _ in range(5):  # Any number of frames may arrive while the requests travel.
        table.update_load(A, replace(load(), num_shown=0))
    assert state_of(table, A).num_reserved_requests == 2
    table.update_load(A, replace(load(running=1), num_shown=1))
    assert state_of(table, A).num_reserved_requests == 1
    table.update_load(A, replace(load(running=2), num_shown=2))
    assert state_of(table, A).num_reserved_requests == 0


def test_a_call_that_no_gateway_submits_is_not_among_the_submits_that_frames_count(
    blocks: Blocks,
) -> None:
    table = table_of(A)
    table.route("call", hashes=blocks("call"), num_prompt_tokens=100, is_submitted=False)
    table.route("submitted", hashes=blocks("submitted"), num_prompt_tokens=70)
    table.update_load(A, replace(load(running=1), num_shown=1))
    table.update_load(A, replace(load(running=2), num_shown=1))
    assert state_of(table, A).num_reserved_requests == 0
    table.route("next", hashes=blocks("next"), num_prompt_tokens=70)
    table.update_load(A, replace(load(running=2), num_shown=1))
    assert state_of(table, A).num_reserved_requests == 1
    table.update_load(A, replace(load(running=3), num_shown=2))
    assert state_of(table, A).num_reserved_requests == 0


def test_a_first_frame_settles_a_reservation_at_once(blocks: Blocks) -> None:
    table = table_of(A)
    for name in ("first", "second"):
        table.route(name, hashes=blocks(name), num_prompt_tokens=100)
    table.started("second", num_cached_tokens=32)
    assert state_of(table, A).num_reserved_tokens == 100
    accuracy = table.stats().accuracy
    assert accuracy.num_cached_tokens == 32
    assert accuracy.num_wrong_tokens == 32 - accuracy.num_predicted_tokens
    table.completed("first")
    assert state_of(table, A).num_reserved_requests == 0


def test_a_reservation_that_is_never_shown_times_out(blocks: Blocks) -> None:
    clock = Clock()
    table = table_of(A, clock=clock, reservation_timeout_s=5)
    table.route("r", hashes=(), num_prompt_tokens=100)
    clock.now_s = 6
    table.expire()
    assert state_of(table, A).num_reserved_requests == 0
    table.completed("r")
    assert table.stats().num_in_flight == 0


def test_a_request_routed_again_leaves_its_first_group(blocks: Blocks) -> None:
    table = table_of(A, B)
    first = table.route("r", hashes=blocks(range(4)), num_prompt_tokens=70).group
    second = table.route(
        "r", hashes=blocks(range(4)), num_prompt_tokens=75, exclude=frozenset({first})
    )
    assert second.group != first
    assert second.reason == "only_group"
    assert state_of(table, first).num_reserved_requests == 0
    assert table.stats().num_in_flight == 1


def test_in_flight_prefixes_are_hits_until_the_last_request_ends(blocks: Blocks) -> None:
    table = table_of(A)
    prompt = blocks(range(4))

    def predicted(request_id: str) -> int:
        decision = table.route(request_id, hashes=prompt, num_prompt_tokens=70)
        return decision.predicted_cached_tokens

    assert predicted("first") == 0
    assert predicted("second") == 64
    table.completed("first")
    assert predicted("third") == 64
    table.completed("second")
    table.completed("third")
    assert predicted("fourth") == 0


def test_an_in_flight_prefix_goes_on_where_the_directory_ends(blocks: Blocks) -> None:
    table = table_of(A)
    prompt = blocks(range(4))
    table.route("first", hashes=prompt, num_prompt_tokens=70)
    batch = EventBatch(epoch=1, first_seq=0, events=(BlocksStored(prompt[:2]),))
    assert table.apply_events(A, batch) == Applied(1)
    decision = table.route("second", hashes=prompt, num_prompt_tokens=70)
    assert decision.predicted_cached_tokens == 64
    table.completed("first")
    table.completed("second")
    decision = table.route("third", hashes=prompt, num_prompt_tokens=70)
    assert decision.predicted_cached_tokens == 32


def test_silent_events_leave_routing_by_load_alone(blocks: Blocks) -> None:
    clock = Clock()
    table = table_of(A, B, clock=clock, stale_after_s=10)
    prompt = blocks(range(4))
    table.apply_events(A, EventBatch(epoch=7, first_seq=0, events=(BlocksStored(prompt),)))
    assert table.route("1", hashes=prompt, num_prompt_tokens=70).reason == "cached_prefix"
    table.completed("1")
    clock.now_s = 11
    assert table.expire() == [A]
    assert table.route("2", hashes=prompt, num_prompt_tokens=70).reason == "least_loaded"
    late = EventBatch(epoch=7, first_seq=1)
    assert table.apply_events(A, late) == NeedsResync(7, 0)


def test_without_a_directory_load_alone_decides(blocks: Blocks) -> None:
    table = table_of(A, B, use_directory=False)
    prompt = blocks(range(4))
    first = table.route("1", hashes=prompt, num_prompt_tokens=70)
    second = table.route("2", hashes=prompt, num_prompt_tokens=70)
    # Without a directory, blocks in flight are unknown too.
    assert {first.group, second.group} == {A, B}
    assert second.predicted_cached_tokens == 0
    assert second.reason == "least_loaded"


def test_a_group_that_left_is_forgotten_and_its_late_messages_change_nothing(
    blocks: Blocks,
) -> None:
    table = table_of(A)
    prompt = blocks(range(4))
    table.route("r", hashes=prompt, num_prompt_tokens=70)
    table.apply_events(A, EventBatch(epoch=1, first_seq=0, events=(BlocksStored(prompt),)))
    table.update_members([])
    table.update_load(A, load(running=3))
    table.apply_events(A, EventBatch(epoch=1, first_seq=0, events=(BlocksStored(prompt),)))
    with pytest.raises(NoGroupAvailable, match="0 known, 0 excluded"):
        table.route("s", hashes=prompt, num_prompt_tokens=70)
    table.update_members([A])
    assert state_of(table, A) == GroupState(group=A)
    assert table.events_position(A) == Position()
    table.completed("r")
    assert table.stats().num_in_flight_blocks == 0
    assert state_of(table, A) == GroupState(group=A)


def test_what_is_remembered_of_requests_is_bounded(blocks: Blocks) -> None:
    table = table_of(A, max_in_flight=3, max_in_flight_blocks=6)
    for i in range(5):
        table.route(str(i), hashes=blocks((i, j) for j in range(4)), num_prompt_tokens=70)
        stats = table.stats()
        assert stats.num_in_flight <= 3
        assert stats.num_in_flight_blocks <= 6
    assert state_of(table, A).num_reserved_requests == 3


def test_a_setting_that_cannot_work_names_itself() -> None:
    with pytest.raises(ConfigError, match="policy='fastest': must be one of prefix_aware"):
        RoutingConfig(policy="fastest")
    serving = "prefix_aware, round_robin, least_loaded, power_of_two"
    with pytest.raises(ConfigError, match=f"policy='dynamo': must be one of {serving}$"):
        RoutingConfig(policy="dynamo")  # It runs in the simulator only.
    with pytest.raises(ConfigError, match="stale_after_s=0: must be above 0"):
        RoutingConfig(stale_after_s=0)
    with pytest.raises(ConfigError, match="stale_after_s=nan: must be above 0"):
        RoutingConfig(stale_after_s=math.nan)


class TableMachine(RuleBasedStateMachine):
    """In any order of events, nothing is counted twice, left over or negative."""

    routed = Bundle("routed")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = table_of(A, B, clock=self.clock, max_in_flight=6)
        self.next_id = 0

    @rule(target=routed, first=st.integers(0, 2), num_blocks=st.integers(0, 3))
    def route(self, first: int, num_blocks: int) -> str:
        self.next_id += 1
        self.send(str(self.next_id), first, num_blocks)
        return str(self.next_id)

    @rule(request_id=routed, first=st.integers(0, 2), num_blocks=st.integers(0, 3))
    def route_again(self, request_id: str, first: int, num_blocks: int) -> None:
        self.send(request_id, first, num_blocks)

    def send(self, request_id: str, first: int, num_blocks: int) -> None:
        hashes = [BlockHash(bytes([first, i] * 16)) for i in range(num_blocks)]
        try:
            self.table.route(request_id, hashes=hashes, num_prompt_tokens=16 * num_blocks + 1)
        except NoGroupAvailable:
            assert self.table.states() == []

    @rule(request_id=routed)
    def start(self, request_id: str) -> None:
        self.table.started(request_id, num_cached_tokens=0)

    @rule(request_id=routed)
    def complete(self, request_id: str) -> None:
        self.table.completed(request_id)

    @rule(group=st.sampled_from([A, B]))
    def frame(self, group: GroupId) -> None:
        self.table.update_load(group, load())

    @rule(members=st.sets(st.sampled_from([A, B])))
    def members(self, members: set[GroupId]) -> None:
        self.table.update_members(members)

    @rule(seconds=st.sampled_from([1, 61]))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds
        self.table.expire()

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.table.stats()
        assert stats.num_in_flight <= 6
        for state in self.table.states():
            assert state.num_reserved_requests >= 0
            assert state.num_reserved_tokens >= state.num_reserved_requests
            assert (state.num_reserved_tokens == 0) == (state.num_reserved_requests == 0)

    def teardown(self) -> None:
        for i in range(self.next_id + 1):
            self.table.completed(str(i))
        stats = self.table.stats()
        assert (stats.num_in_flight, stats.num_in_flight_blocks) == (0, 0)
        assert stats.num_reserved_tokens == 0
        for state in self.table.states():
            assert state.num_reserved_requests == 0


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=examples(60), stateful_step_count=30)
