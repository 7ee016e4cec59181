"""Admission that goes through the groups in turn for each question.

What it takes from the code is how fast a group is (`quire.router.policies.speeds`).
"""

from bisect import insort
from collections.abc import Collection
from itertools import accumulate
from math import inf

from quire.cluster.serving.admission import Admission
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Stage, Ticket, WaitingLoad, order
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupLoad, GroupState
from quire.router.policies.speeds import (
    PRIOR_OUTPUT_PER_S,
    PRIOR_PREFILL_PER_S,
    Rate,
    Rates,
    Speeds,
)
from quire.router.prefix_index.directory import GroupId


class PlainCapacity(Capacity):
    """Learns for itself how fast the groups are."""

    def __init__(self) -> None:
        super().__init__(block_size=16)
        self._common = Rates.new()
        self._speeds: dict[GroupId, Speeds] = {}

    def observe(self, group: GroupId, load: GroupLoad, *, at_s: float) -> None:
        speeds = self._speeds.setdefault(group, Speeds(self._common))
        speeds.observe(load, at_s=at_s, is_awaited=False)

    def keep(self, groups: Collection[GroupId]) -> None:
        self._speeds = {name: each for name, each in self._speeds.items() if name in groups}

    def room(self, loads: Loads, *, wait_s: float, tokens_each: float) -> float:
        gateways = max([1, *(state.num_gateways for state in loads.states)])
        tokens_each = max(tokens_each, 1.0)
        each = [self.room_in(state, wait_s, tokens_each, gateways) for state in loads.states]
        return list(accumulate(each, initial=0.0))[-1]

    def room_in(self, state: GroupState, wait_s: float, tokens_each: float, gateways: int) -> float:
        mean = self.mean_output
        limits = []
        sent = state.num_reserved_tokens * gateways
        spare_tokens = self.prefill_per_s(state) * wait_s - (
            state.num_pending_prefill_tokens + sent
        )
        limits.append(0.0 if spare_tokens < 0 else spare_tokens / tokens_each + 1)
        if state.max_num_seqs:
            busy = state.num_running + state.num_waiting + state.num_reserved_requests * gateways
            limits.append(state.max_num_seqs - busy + self.full_per_s(state) / mean * wait_s)
        elif state.num_waiting > 0:
            limits.append(0.0)
        if state.num_running and state.num_available_blocks is not None:
            free, size = state.num_available_blocks, self._block_size
            held = max((state.num_blocks or 0) - free, 0)
            let_go = self.short_per_s(state) / mean * wait_s * held / state.num_running
            tokens = state.num_pending_prefill_tokens + state.num_reserved_tokens
            free_then = free + let_go - (tokens / size + state.num_running)
            limits.append(free_then / (tokens_each / size + 1))
        is_idle = state.num_running == state.num_waiting == state.num_reserved_requests == 0
        return max(min(limits), 1.0 if is_idle else 0.0)

    def begun_per_s(self, loads: Loads, *, tokens_each: float) -> float:
        per_s = []
        for state in loads.states:
            prefills = self.prefill_per_s(state) / max(tokens_each, 1.0)
            per_s.append(min(prefills, self.full_per_s(state) / self.mean_output))
        return sum(per_s)

    def prefill_per_s(self, state: GroupState) -> float:
        return self._per_s(state, "prefill", PRIOR_PREFILL_PER_S)

    def full_per_s(self, state: GroupState) -> float:
        """Output tokens per second with every slot taken."""
        if state.max_num_seqs is None:
            return inf
        return self._per_s(state, "output_when_full", PRIOR_OUTPUT_PER_S * state.max_num_seqs)

    def short_per_s(self, state: GroupState) -> float:
        """Output tokens per second with slots left."""
        prior = PRIOR_OUTPUT_PER_S * (state.max_num_seqs or 1)
        return self._per_s(state, "output_when_short", prior)

    def _per_s(self, state: GroupState, name: str, prior: float) -> float:
        speeds = self._speeds.get(state.group) or Speeds(self._common)
        own: Rate = getattr(speeds.own, name)
        common: Rate = getattr(self._common, name)
        return own.per_s(common.per_s(prior))


class PlainAdmission(Admission):
    def offer(self, ticket: Ticket, loads: Loads, *, now_s: float) -> list[Ticket]:
        displaced: list[Ticket] = []
        begins = not self._ahead_of(ticket).num_requests and self._can_begin(ticket, loads)
        if not begins:
            displaced = self._make_room(ticket, loads, now_s)
            for victim in displaced:
                self.leave(victim)
        self._num_offered += 1
        ticket.number = self._num_offered
        self._waiting.add(ticket.num_requests, ticket.num_prompt_tokens)
        ticket.stage = Stage.QUEUED
        insort(self.queued, ticket, key=order)
        self._queued.setdefault(ticket.priority, WaitingLoad()).add_ticket(ticket)
        if self.queued[0] is ticket and self._can_begin(ticket, loads):
            self._release(ticket)
        return displaced
