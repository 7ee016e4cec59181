import random
import re
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.examples import examples

from quire.cluster.cli.commands import command_line
from quire.cluster.errors import Overloaded
from quire.cluster.serving.admission import Admission
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Stage, Ticket
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupLoad, GroupState
from quire.router.policies.speeds import Rates, Speeds
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.request.errors import ConfigError

NUM_SLOTS = 4


def frame(**load: Any) -> GroupLoad:
    numbers = {"num_waiting": 0, "num_pending_prefill_tokens": 0, "num_available_blocks": 0}
    return GroupLoad(**{**numbers, "num_running": 1, **load})


class Known:
    """A gateway's estimates of one group ``g`` with `NUM_SLOTS` slots, and of output lengths."""

    def __init__(self, *, gateways: int = 1) -> None:
        self.capacity = Capacity(block_size=16)
        self._gateways = gateways
        self._common = Rates.new()
        self._speeds = Speeds(self._common)

    def observe(self, load: GroupLoad, *, at_s: float, is_awaited: bool = False) -> None:
        self._speeds.observe(load, at_s=at_s, is_awaited=is_awaited)

    def loads(self, *states: GroupState) -> Loads:
        """Loads of the group in these states."""
        loads = Loads(
            [replace(state, num_gateways=self._gateways) for state in states], common=self._common
        )
        for position in range(len(states)):
            loads.put_speeds(position, self._speeds)
        return loads

    def room(self, state: GroupState, *, wait_s: float, tokens_each: float) -> float:
        return self.capacity.room(self.loads(state), wait_s=wait_s, tokens_each=tokens_each)

    def begun_per_s(self, state: GroupState, *, tokens_each: float) -> float:
        return self.capacity.begun_per_s(self.loads(state), tokens_each=tokens_each)


@cache
def known(*, prefill_per_s: int = 1000, output_per_s: int = 100, gateways: int = 1) -> Known:
    """Estimates after observing these speeds, and outputs of 50 tokens."""
    known = Known(gateways=gateways)
    for second in range(100):
        load = frame(
            num_running=NUM_SLOTS,
            num_waiting=1,
            num_pending_prefill_tokens=2 * prefill_per_s,
            num_prompt_tokens=second * prefill_per_s,
            num_output_tokens=second * output_per_s,
            max_num_seqs=NUM_SLOTS,
        )
        known.observe(load, at_s=float(second))
    for _ in range(500):
        known.capacity.asked(1000)
        known.capacity.generated(50)
        known.capacity.ended(1)
    return known


def loads(*states: GroupState, gateways: int = 1) -> Loads:
    return known(gateways=gateways).loads(*states)


def group(**load: Any) -> GroupState:
    numbers = {"num_running": 1, "max_num_seqs": NUM_SLOTS, **load}
    return GroupState(group=GroupId("g"), **numbers)


FULL = group(num_running=NUM_SLOTS)


def admission(**config: Any) -> Admission:
    values = {"min_queued_per_group": 1, **config}
    return Admission(AdmissionConfig(**values), known().capacity)


def ticket(num_prompt_tokens: int = 10, **values: Any) -> Ticket:
    return Ticket(num_prompt_tokens=num_prompt_tokens, **values)


def test_speeds_are_those_of_a_busy_group() -> None:
    group = known.__wrapped__()
    for now_s in (100.0, 10_000.0):  # It runs one request slowly, and is idle afterwards.
        idle = frame(num_prompt_tokens=100_000, num_output_tokens=10_000, max_num_seqs=NUM_SLOTS)
        group.observe(idle, at_s=now_s)
    # 100 tokens/s in outputs of 50 end 2 sequences a second; 1,000 tokens/s begin 10 of 100.
    assert group.begun_per_s(FULL, tokens_each=100) == pytest.approx(2, rel=0.1)


def after_steps(num_tokens: int, *, step_s: float, decode_s: float) -> Known:
    """Knows one group that computed one such prompt in each of ten steps, and decoded between."""
    known = Known()
    now_s = 0.0
    for number in range(10):
        decoding = frame(num_prompt_tokens=number * num_tokens)
        for _ in range(5):
            known.observe(decoding, at_s=now_s)
            now_s += decode_s
        asked = {"num_waiting": 1, "num_pending_prefill_tokens": num_tokens}
        waiting = frame(num_prompt_tokens=number * num_tokens, **asked)
        known.observe(waiting, at_s=now_s)
        now_s += step_s
    return known


def test_a_short_prompt_alone_in_a_step_does_not_pass_for_a_slow_group() -> None:
    known = after_steps(20, step_s=0.1, decode_s=0.1)
    assert known.room(group(max_num_seqs=128), wait_s=1, tokens_each=20) >= 100


def test_a_long_prompt_alone_in_a_step_shows_how_fast_the_group_is() -> None:
    known = after_steps(1500, step_s=2.1, decode_s=0.1)
    per_s = known.begun_per_s(group(max_num_seqs=128), tokens_each=1500)
    assert per_s == pytest.approx(0.5, rel=0.1)


def test_prompts_that_take_several_steps_show_the_speed_without_a_step_of_decodes() -> None:
    """A prompt counts as begun as a whole in one frame; frames of its other steps add nothing."""
    known = Known()
    for second in range(100):
        begun, steps_ahead = 1 + second // 3, 3 - second % 3  # Steps of 1,000 tokens.
        load = frame(
            num_waiting=1,
            num_prompt_tokens=3000 * begun,
            num_pending_prefill_tokens=1000 * (steps_ahead - 1) + 3000,
        )
        known.observe(load, at_s=float(second))
    assert known.begun_per_s(group(max_num_seqs=128), tokens_each=1000) == pytest.approx(1, rel=0.2)


def after_a_slow_time(*, is_awaited: bool) -> float:
    """Estimated prompts of 300 tokens that a group begins per second. Each of ten took 3 s, each of
    a hundred more 0.18 s with 0.02 s of decodes between. No frame shows these before they are
    computed, since each is sent while the step before it runs."""
    known = Known()
    now_s, num_begun = 0.0, 0

    def step(**load: int) -> None:
        begun = frame(num_prompt_tokens=300 * num_begun, **load)
        known.observe(begun, at_s=now_s, is_awaited=is_awaited and num_begun > 10)

    for _ in range(10):
        step(num_waiting=1, num_pending_prefill_tokens=300)
        num_begun, now_s = num_begun + 1, now_s + 3
        step()
    for _ in range(100):
        now_s += 0.02
        step()
        num_begun, now_s = num_begun + 1, now_s + 0.18
        step()
    return known.begun_per_s(group(max_num_seqs=128), tokens_each=300)


def test_prompts_that_are_sent_one_by_one_show_the_speed_while_others_wait_here() -> None:
    assert after_a_slow_time(is_awaited=True) == pytest.approx(5, rel=0.2)


def test_prompts_that_nobody_waits_behind_show_no_speed() -> None:
    assert after_a_slow_time(is_awaited=False) == pytest.approx(1 / 3, rel=0.2)


@pytest.mark.parametrize(
    ("state", "tokens_each", "expected"),
    [
        # 2 s: the tokens of 19 more are computed while the first begin, or 3 slots and 4 that end.
        (group(), 100, 7),
        (group(num_pending_prefill_tokens=1500), 250, 3),
        (group(num_reserved_tokens=1500, num_reserved_requests=1), 250, 3),
        (group(num_pending_prefill_tokens=2500), 10, 0),
        (FULL, 10, 4),
        (group(num_running=NUM_SLOTS, num_waiting=3), 10, 1),
        # 12 blocks to spare of which one goes to the running sequence; each needs 2 and 1.
        (group(num_available_blocks=12, num_blocks=12), 32, 11 / 3),
        (group(num_running=0, num_available_blocks=0, num_blocks=9), 10**9, 1),
    ],
)
def test_the_room_is_what_its_narrowest_resource_allows(
    state: GroupState, tokens_each: float, expected: float
) -> None:
    room = known().room(state, wait_s=2, tokens_each=tokens_each)
    assert room == pytest.approx(expected, rel=0.1)


def test_other_gateways_are_taken_to_have_sent_as_much() -> None:
    state = group(num_reserved_requests=1, num_reserved_tokens=400)
    alone, among = known(), known(gateways=4)
    assert alone.room(state, wait_s=2, tokens_each=400) == pytest.approx(5, rel=0.1)
    assert among.room(state, wait_s=2, tokens_each=400) == pytest.approx(2, rel=0.1)


def test_there_are_as_many_gateways_as_the_group_says_that_knows_of_most() -> None:
    """Only this gateway has attached to a group that has just started."""
    table = RoutingTable(block_size=16)
    assert table.loads().most_gateways == 1
    a, b, c = map(GroupId, "abc")
    table.update_members([a, b, c])
    for name, num_gateways in ((a, 3), (b, 1), (c, 0)):  # The last reports no number.
        table.update_load(name, frame(num_gateways=num_gateways))
    assert table.loads().most_gateways == 3
    table.update_load(a, frame(num_gateways=2))
    assert table.loads().most_gateways == 2
    table.update_members([b, c])
    table.update_members([a, b, c])
    assert table.loads().most_gateways == 1, "what was said before it started again is forgotten"
    table.update_load(b, frame(num_gateways=4))
    table.update_members([a, c])
    assert table.loads().most_gateways == 1
    table.update_members([])
    assert table.loads().most_gateways == 1


def test_an_output_under_way_counts_for_the_mean_length() -> None:
    known = Known()
    known.capacity.asked(10_000)
    known.capacity.generated(5_000)
    for second in range(100):
        known.observe(frame(num_output_tokens=second * 100, max_num_seqs=1), at_s=float(second))
    state = group(max_num_seqs=1)
    assert known.begun_per_s(state, tokens_each=1) == pytest.approx(100 / 5_128, rel=0.1)


def test_a_request_that_can_begin_is_released_at_once() -> None:
    queue, first = admission(), ticket()
    assert queue.offer(first, loads(group()), now_s=0) == []
    stages = [first.stage]
    assert queue.unbegun == (1, 10)
    queue.begun(first)
    assert [*stages, first.stage] == [Stage.RELEASED, Stage.BEGUN]
    assert queue.unbegun == (0, 0)


def test_one_that_cannot_waits_and_is_released_when_there_is_room() -> None:
    queue = admission(max_queue_wait_s=10)
    tickets = [ticket(priority=priority) for priority in (0, 5, -5, 0)]
    for each in tickets:
        queue.offer(each, loads(FULL), now_s=0)
        assert each.stage is Stage.QUEUED
    assert queue.release(loads(FULL)) == []
    assert queue.release(loads(group(num_running=1))) == [tickets[2], tickets[0], tickets[3]]
    assert queue.release(loads(FULL)) == [], "the three are on their way"
    for each in tickets:
        queue.routed(each)
    assert queue.release(loads(group())) == [tickets[1]]


def test_one_that_would_wait_too_long_is_refused_with_numbers() -> None:
    queue = admission(max_queue_wait_s=2.1)
    for _ in range(4):  # 2 s are what 4 need to end.
        queue.offer(ticket(), loads(FULL), now_s=0)
    with pytest.raises(Overloaded, match=r"max-queue-wait-s is 2.1; try again in") as raised:
        queue.offer(ticket(), loads(FULL), now_s=0)
    assert raised.value.reason == "wait"
    assert 0 < raised.value.retry_after_s <= 2


@pytest.mark.parametrize("num_waiting", [0, 2, 20])
@pytest.mark.parametrize("num_tokens", [1, 500, 10_000])
def test_a_refusal_predicts_more_than_the_bound_that_it_names(
    num_waiting: int, num_tokens: int
) -> None:
    queue = admission(max_queue_wait_s=2.0)
    full = group(
        num_running=NUM_SLOTS,
        num_waiting=num_waiting,
        num_pending_prefill_tokens=num_waiting * num_tokens,
    )
    message = str(refused(queue, full, num_prompt_tokens=num_tokens))
    found = re.search(r"would begin in about (.*) s: --max-queue-wait-s is 2;", message)
    assert found is not None, message
    assert float(found[1]) >= 2.0


def refused(queue: Admission, state: GroupState, **values: Any) -> Overloaded:
    """Offers equal requests; returns the error of the first that is refused."""
    for _ in range(100):
        try:
            queue.offer(ticket(**values), loads(state), now_s=0)
        except Overloaded as error:
            return error
    raise AssertionError("all were taken")


def test_by_default_none_is_refused_for_its_wait_nor_for_its_deadline() -> None:
    queue = admission()
    waiting = [ticket(10_000, deadline_s=10.0) for _ in range(500)]
    for each in waiting:
        queue.offer(each, loads(FULL), now_s=0)
    queue.check(0, loads(FULL), now_s=9)
    assert list(queue.queued) == waiting


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"max_queued_requests": 3}, "--max-queued-requests is 3"),
        ({"max_queued_bytes": 999}, "--max-queued-bytes 999"),
        ({"max_queue_wait_s": 1.0}, "--max-queue-wait-s is 1"),
    ],
)
def test_a_refusal_names_the_flag_that_bounds_it(bounds: dict[str, Any], told: str) -> None:
    queue = admission(**bounds)
    message = str(refused(queue, FULL, num_prompt_tokens=10, num_bytes=300))
    assert told in message
    for flag in re.findall(r"--[a-z-]+", message):
        command_line().parse_args(["serve", flag, "5"])


def test_a_refusal_does_not_tell_how_large_the_waiting_requests_are() -> None:
    messages = set()
    for num_bytes in (300, 400):
        queue = admission(max_queued_requests=3)
        messages.add(str(refused(queue, FULL, num_prompt_tokens=10, num_bytes=num_bytes)))
    assert len(messages) == 1


def test_one_whose_deadline_cannot_be_met_is_refused_at_once() -> None:
    queue = admission(max_queue_wait_s=10)
    queue.offer(ticket(), loads(FULL), now_s=5)
    queue.offer(ticket(), loads(FULL), now_s=5)
    queue.offer(ticket(deadline_s=9.0), loads(FULL), now_s=5)
    with pytest.raises(Overloaded, match="after its deadline") as raised:
        queue.offer(ticket(deadline_s=6.0), loads(FULL), now_s=5)
    assert raised.value.reason == "deadline"


def test_a_higher_priority_takes_the_place_of_the_last_of_the_lowest() -> None:
    queue = admission(max_queued_requests=3, max_queue_wait_s=10)
    low = [ticket(priority=7), ticket(priority=9), ticket(priority=9)]
    for each in low:
        queue.offer(each, loads(FULL), now_s=0)
    with pytest.raises(Overloaded, match="max-queued-requests is 3"):
        queue.offer(ticket(priority=9), loads(FULL), now_s=0)
    high = ticket(priority=1)
    assert queue.offer(high, loads(FULL), now_s=0) == [low[2]]
    assert low[2].stage is Stage.LEFT
    assert list(queue.queued) == [high, low[0], low[1]]


def test_what_has_no_chance_is_refused_before_its_size_is_known() -> None:
    queue = admission(max_queued_requests=1)
    queue.check(5, loads(FULL), now_s=0)
    waiting = ticket(priority=5)
    queue.offer(waiting, loads(FULL), now_s=0)
    with pytest.raises(Overloaded, match="max-queued-requests is 1"):
        queue.check(5, loads(FULL), now_s=0)
    queue.check(1, loads(FULL), now_s=0)  # Accepted, it would displace the other.
    assert list(queue.queued) == [waiting]


def test_without_groups_requests_wait_within_the_bounds() -> None:
    queue = admission(max_queued_bytes=100)
    big, small = ticket(num_bytes=5000), ticket(num_bytes=10)
    queue.offer(big, loads(), now_s=0)
    with pytest.raises(Overloaded, match="max-queued-bytes 100"):
        queue.offer(small, loads(), now_s=0)
    assert list(queue.queued) == [big]
    queue.leave(big)
    queue.offer(small, loads(), now_s=0)
    assert list(queue.queued) == [small]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue_wait_s", -1),
        ("max_queue_wait_s", float("nan")),
        ("max_group_wait_s", 0),
        ("max_queued_requests", 0),
        ("max_queued_bytes", 0),
        ("max_inflight", 0),
        ("min_queued_per_group", 0),
    ],
)
def test_a_bad_setting_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}: must be"):
        AdmissionConfig(**{name: value})  # type: ignore[arg-type]


class AdmissionMachine(RuleBasedStateMachine):
    """Admission, compared with a list of all tickets and their outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = admission(max_queued_requests=5, max_queued_bytes=2000, max_queue_wait_s=3)
        self.live: list[Ticket] = []
        self.now_s = 0.0
        self.states = loads(FULL)

    @rule(
        tokens=st.integers(1, 3000),
        number=st.integers(1, 4),
        priority=st.integers(-1, 1),
        patience_s=st.sampled_from([inf, 0.5, 5.0]),
    )
    def offer(self, tokens: int, number: int, priority: int, patience_s: float) -> None:
        self.now_s += 0.1
        new = Ticket(
            num_prompt_tokens=tokens,
            num_requests=number,
            num_bytes=tokens,
            priority=priority,
            deadline_s=self.now_s + patience_s,
        )
        before = list(self.queue.queued)
        try:
            displaced = self.queue.offer(new, self.states, now_s=self.now_s)
        except Overloaded:
            assert list(self.queue.queued) == before
            assert new.stage is Stage.NEW
            return
        assert all(each.priority > priority for each in displaced)
        assert displaced == before[::-1][: len(displaced)]
        self.live = [each for each in self.live if each not in displaced] + [new]

    @rule(
        running=st.integers(0, NUM_SLOTS),
        waiting=st.integers(0, 3),
        pending=st.integers(0, 3000),
        there=st.booleans(),
    )
    def load(self, running: int, waiting: int, pending: int, there: bool) -> None:
        state = group(num_running=running, num_waiting=waiting, num_pending_prefill_tokens=pending)
        self.states = loads(*[state] * there)
        before = list(self.queue.queued)
        released = self.queue.release(self.states)
        assert released == before[: len(released)], "by priority, then in order of arrival"
        if there and not running + waiting + pending and before:
            sent = [each for each in self.live if each.stage is Stage.RELEASED]
            assert sent, "an idle group is given something"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), step=st.sampled_from(["routed", "begun", "leave", "leave"]))
    def go_on(self, data: st.DataObject, step: str) -> None:
        each = data.draw(st.sampled_from(self.live))
        getattr(self.queue, step)(each)
        if step == "leave":
            self.live.remove(each)

    @invariant()
    def nothing_is_lost(self) -> None:
        queued = [each for each in self.live if each.stage is Stage.QUEUED]
        assert sorted(queued, key=lambda each: (each.priority, each.number)) == list(
            self.queue.queued
        )
        waiting = [each for each in self.live if each.stage is not Stage.BEGUN]
        assert self.queue.unbegun == (
            sum(each.num_requests for each in waiting),
            sum(each.num_prompt_tokens for each in waiting),
        )
        assert not any(each.stage in (Stage.NEW, Stage.LEFT) for each in self.live)

    @invariant()
    def the_bounds_hold(self) -> None:
        queued = self.queue.queued
        if len(queued) > 1:
            assert sum(each.num_requests for each in queued) <= 5
            assert sum(each.num_bytes for each in queued) <= 2000


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)


def test_the_order_does_not_depend_on_chance() -> None:
    rng = random.Random(3)
    queue = admission(max_queued_requests=200, max_queue_wait_s=1e6)
    tickets = [ticket(priority=rng.randint(-3, 3)) for _ in range(150)]
    for each in tickets:
        queue.offer(each, loads(), now_s=0)
    expected = sorted(tickets, key=lambda each: each.priority)  # A stable sort.
    assert list(queue.queued) == expected
