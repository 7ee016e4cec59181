"""Admission on arrays decides like a loop over groups."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cluster.plain_admission import PlainAdmission, PlainCapacity
from tests.examples import examples

from quire.cluster.errors import Overloaded
from quire.cluster.serving.admission import Admission
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Stage, Ticket
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupLoad, GroupState
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable

NAMES = [GroupId(f"g{number:02}") for number in range(20)]
SLOTS = (0, 1, 4, 16)  # 0: the group reports no number.
CONFIGS = [
    AdmissionConfig(),
    AdmissionConfig(max_queue_wait_s=3.0, min_queued_per_group=1),
    AdmissionConfig(max_queue_wait_s=8.0, max_queued_requests=6),
    AdmissionConfig(max_queue_wait_s=0.2, max_queued_bytes=9000, max_group_wait_s=0.1),
    AdmissionConfig(max_queued_requests=4),
]
WEIGHTS = {"": 1.0, "a": 1.0, "b": 0.25, "c": 4.0}  # Powers of two, so that sums are exact.
few_numbers = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 7, 16])
many_tokens = st.sampled_from([0, 0, 1, 16, 100, 1000, 4000, 30_000])


class TwinMachine(RuleBasedStateMachine):
    """Drives admission on arrays and its twin, which loops over groups, with the same events.
    Requests of the first go to the groups of a real table."""

    @initialize(
        config=st.sampled_from(CONFIGS),
        names=st.lists(st.sampled_from(NAMES), min_size=3, unique=True),
    )
    def begin(self, config: AdmissionConfig, names: list[GroupId]) -> None:
        self.now_s = 0.0
        self.capacities = (Capacity(block_size=16), PlainCapacity())
        self.admissions = (
            Admission(config, self.capacities[0]),
            PlainAdmission(config, self.capacities[1]),
        )
        self.table = RoutingTable(block_size=16, clock=lambda: self.now_s)
        self.live: list[tuple[Ticket, Ticket]] = []
        self.steps = dict.fromkeys(NAMES, (0, 0))
        self.members: set[GroupId] = set()
        self.change_members(names)

    @rule(
        num_tokens=st.sampled_from([1, 10, 300, 3000, 20_000]) | st.integers(1, 9000),
        num_requests=st.sampled_from([1, 1, 1, 2, 5]),
        priority=st.sampled_from([0, 0, -1, 2]),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        patience_s=st.sampled_from([inf, inf, 0.0, 0.2, 1.0, 5.0]),
        is_sent=st.booleans(),
        times=st.integers(1, 6),
    )
    def offers(
        self, times: int, num_tokens: int, num_requests: int, priority: int, **how: Any
    ) -> None:
        for number in range(times):
            self.offer(num_tokens + number, num_requests, priority, **how)

    def offer(
        self,
        num_tokens: int,
        num_requests: int,
        priority: int,
        tenant: str,
        patience_s: float,
        is_sent: bool,
    ) -> None:
        ticket = Ticket(
            num_prompt_tokens=num_tokens,
            num_requests=num_requests,
            num_bytes=num_tokens,
            priority=priority,
            tenant=tenant,
            weight=WEIGHTS[tenant],
            deadline_s=self.now_s + patience_s,
        )
        pair = (ticket, replace(ticket))
        states = self.table.loads()
        answers: list[Any] = []
        for admission, each in zip(self.admissions, pair, strict=True):
            try:
                displaced = admission.offer(each, states, now_s=self.now_s)
                answers.append([victim.number for victim in displaced])
            except Overloaded as error:
                answers.append((str(error), error.reason, error.retry_after_s))
        assert answers[0] == answers[1]
        if isinstance(answers[0], list):
            self.live = [(a, b) for a, b in self.live if a.stage is not Stage.LEFT] + [pair]
            if is_sent:
                self.send(pair)

    @rule(priority=st.integers(-1, 2), tenant=st.sampled_from(sorted(WEIGHTS)))
    def check(self, priority: int, tenant: str) -> None:
        states = self.table.loads()
        answers = []
        for admission in self.admissions:
            try:
                admission.check(
                    priority, states, now_s=self.now_s, tenant=tenant, weight=WEIGHTS[tenant]
                )
                answers.append("")
            except Overloaded as error:
                answers.append(str(error))
        assert answers[0] == answers[1]

    @rule()
    def release(self) -> None:
        states = self.table.loads()
        released = [
            [each.number for each in admission.release(states)] for admission in self.admissions
        ]
        assert released[0] == released[1]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(["send", "send", "begin", "leave", "take"]))
    def go_on(self, data: st.DataObject, what: str) -> None:
        pair = data.draw(st.sampled_from(self.live))
        name = str(pair[0].number)
        if what == "send":
            self.send(pair)
        elif what == "begin" and pair[0].stage is Stage.ROUTED:
            self.table.started(name, num_cached_tokens=0)
            for admission, each in zip(self.admissions, pair, strict=True):
                admission.begun(each)
        elif what == "take":
            num_tokens, num_cached = data.draw(st.tuples(many_tokens, many_tokens))
            for admission, each in zip(self.admissions, pair, strict=True):
                admission.took(each, num_tokens=num_tokens)
                admission.began_cached(each, num_cached_tokens=num_cached)
        elif what == "leave":
            self.table.completed(name)
            for admission, each in zip(self.admissions, pair, strict=True):
                admission.leave(each)
            self.live.remove(pair)

    def send(self, pair: tuple[Ticket, Ticket]) -> None:
        if pair[0].stage is not Stage.RELEASED or not self.members:
            return
        num_tokens = pair[0].num_prompt_tokens
        self.table.route(str(pair[0].number), hashes=(), num_prompt_tokens=num_tokens)
        for admission, each in zip(self.admissions, pair, strict=True):
            admission.routed(each)

    @rule(
        running=st.sampled_from([1, 15, 16]),
        waiting=st.sampled_from([0, 1, 3]),
        pending=many_tokens,
        blocks=st.sampled_from([7, 100, 1000, 2000]),
        gateways=st.sampled_from([1, 2, 3]),
        data=st.data(),
    )
    def all_are_busy(self, data: st.DataObject, **load: int) -> None:
        """Reports nearly all groups as busy, and advances the clock by a slow step."""
        spared = data.draw(st.sets(st.sampled_from(NAMES), max_size=2))
        for group in sorted(self.members - spared):
            self.frame(group, **load, prompt=512, output=load["running"])
        self.now_s += 0.1

    @rule(
        group=st.sampled_from(NAMES),
        running=few_numbers,
        waiting=few_numbers,
        pending=many_tokens,
        blocks=st.sampled_from([0, 1, 50, 2000]),
        prompt=many_tokens,
        output=many_tokens,
        gateways=st.sampled_from([0, 1, 1, 1, 1, 3]),
    )
    def one_frame(self, group: GroupId, **load: Any) -> None:
        self.frame(group, **load)

    def frame(
        self,
        group: GroupId,
        running: int,
        waiting: int,
        pending: int,
        blocks: int,
        prompt: int,
        output: int,
        gateways: int,
    ) -> None:
        num_prompt, num_output = self.steps[group]
        self.steps[group] = num_prompt + prompt, num_output + output
        load = GroupLoad(
            num_running=running,
            num_waiting=waiting,
            num_pending_prefill_tokens=pending,
            num_available_blocks=blocks,
            num_prompt_tokens=num_prompt + prompt,
            num_hit_tokens=(num_prompt + prompt) // 3,
            num_output_tokens=num_output + output,
            max_num_seqs=SLOTS[NAMES.index(group) % len(SLOTS)] or None,
            num_gateways=gateways,
        )
        self.table.update_load(group, load)
        if group in self.members:
            self.capacities[1].observe(group, load, at_s=self.now_s)

    @rule(groups=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    def join_or_leave(self, groups: list[GroupId]) -> None:
        self.change_members(groups)

    @rule(group=st.sampled_from(NAMES))
    def start_again(self, group: GroupId) -> None:
        self.steps[group] = (0, 0)
        if group in self.members:
            self.change_members([group])
            self.change_members([group])

    def change_members(self, groups: Iterable[GroupId]) -> None:
        self.members ^= set(groups)
        self.table.update_members(self.members)
        self.capacities[1].keep(self.members)

    @rule(num_tokens=st.integers(1, 3000), ends=st.integers(0, 3))
    def generate(self, num_tokens: int, ends: int) -> None:
        for capacity in self.capacities:
            capacity.asked(2 * num_tokens)
            capacity.generated(num_tokens)
            capacity.ended(ends)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        wait_s=st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 100),
        tokens_each=st.sampled_from([0.0, 1.0, 100.0]) | st.floats(0, 1e5),
    )
    def they_see_the_same(self, wait_s: float, tokens_each: float) -> None:
        """Asserts equal results, bit by bit."""
        ours, plain = self.capacities
        for states in [self.table.loads()] * 2:
            rooms = [
                each.room(states, wait_s=wait_s, tokens_each=tokens_each) for each in (ours, plain)
            ]
            assert rooms[0] == rooms[1]
            speeds = [each.begun_per_s(states, tokens_each=tokens_each) for each in (ours, plain)]
            assert speeds[0] == speeds[1]

    @invariant()
    def they_hold_the_same(self) -> None:
        if not hasattr(self, "admissions"):
            return
        self.they_see_the_same(wait_s=1.0, tokens_each=500.0)
        self.they_see_the_same(wait_s=0.0, tokens_each=1.0)
        queues = [[each.number for each in admission.queued] for admission in self.admissions]
        assert queues[0] == queues[1]
        assert self.admissions[0].unbegun == self.admissions[1].unbegun
        for ours, plain in self.live:
            assert (ours.stage, ours.number) == (plain.stage, plain.number)


TestTwins = pytest.mark.slow(TwinMachine.TestCase)
TestTwins.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)


@given(
    rounds=st.lists(
        st.dictionaries(st.integers(0, 99), st.integers(0, 5), max_size=8), min_size=1, max_size=4
    )
)
def test_whichever_of_a_hundred_groups_change_the_room_is_that_of_each_in_turn(
    rounds: list[dict[int, int]],
) -> None:
    ours, plain = Capacity(block_size=16), PlainCapacity()
    states = [GroupState(group=GroupId(str(number)), num_running=1) for number in range(100)]
    for changes in rounds:
        states = states.copy()
        for position, tokens in changes.items():
            states[position] = replace(states[position], num_pending_prefill_tokens=1000 * tokens)
        rooms = [each.room(Loads(states), wait_s=0.3, tokens_each=7) for each in (ours, plain)]
        assert rooms[0] == rooms[1]
