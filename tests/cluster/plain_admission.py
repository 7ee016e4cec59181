"""Admission that keeps no state of the groups: each question goes through all of them in turn.

What it takes from the code is how fast a group is (`quire.cluster.serving.speeds`).
"""

from bisect import insort
from itertools import accumulate
from math import inf

from quire.cluster.serving.admission import Admission
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.speeds import PRIOR_OUTPUT_PER_S, GroupPace
from quire.cluster.serving.ticket import Stage, Ticket, WaitingLoad, order
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupState
from quire.v1 import group_pb2 as pb


class PlainCapacity(Capacity):
    def room(self, loads: Loads, *, wait_s: float, tokens_each: float) -> float:
        each = [self.room_in(state, wait_s, max(tokens_each, 1.0)) for state in loads.states]
        return list(accumulate(each, initial=0.0))[-1]

    def room_in(self, state: GroupState, wait_s: float, tokens_each: float) -> float:
        pace, mean, gateways = self.pace(state), self._outputs.mean, self.num_gateways
        limits = []
        sent = state.num_reserved_tokens * gateways
        spare_tokens = pace.prefill_per_s * wait_s - (state.num_pending_prefill_tokens + sent)
        limits.append(0.0 if spare_tokens < 0 else spare_tokens / tokens_each + 1)
        if pace.max_num_seqs:
            busy = state.num_running + state.num_waiting + state.num_reserved_requests * gateways
            limits.append(pace.max_num_seqs - busy + full_per_s(pace) / mean * wait_s)
        elif state.num_waiting > 0:
            limits.append(0.0)
        if state.num_running and state.num_available_blocks is not None:
            free, size = state.num_available_blocks, pace.block_size
            held = max((state.num_blocks or 0) - free, 0)
            let_go = short_per_s(pace) / mean * wait_s * held / state.num_running
            tokens = state.num_pending_prefill_tokens + state.num_reserved_tokens
            free_then = free + let_go - (tokens / size + state.num_running)
            limits.append(free_then / (tokens_each / size + 1))
        is_idle = state.num_running == state.num_waiting == state.num_reserved_requests == 0
        return max(min(limits), 1.0 if is_idle else 0.0)

    def begun_per_s(self, loads: Loads, *, tokens_each: float) -> float:
        per_s = []
        for pace in map(self.pace, loads.states):
            prefills = pace.prefill_per_s / max(tokens_each, 1.0)
            per_s.append(min(prefills, full_per_s(pace) / self._outputs.mean))
        return sum(per_s)

    def num_queued(self, loads: Loads) -> tuple[int, int]:
        waiting = reserved = 0
        for state in loads.states:
            waiting, reserved = (
                waiting + state.num_waiting,
                reserved + state.num_reserved_requests,
            )
        return waiting, reserved

    def pace(self, state: GroupState) -> GroupPace:
        return self._groups.get(state.group) or GroupPace(pb.GroupDescription(), self._all)


def full_per_s(pace: GroupPace) -> float:
    """Output tokens per second with every slot taken."""
    if pace.max_num_seqs is None:
        return inf
    prior = PRIOR_OUTPUT_PER_S * pace.max_num_seqs
    return pace.own.output_when_full.per_s(pace._others.output_when_full.per_s(prior))


def short_per_s(pace: GroupPace) -> float:
    """Output tokens per second with slots left."""
    prior = PRIOR_OUTPUT_PER_S * (pace.max_num_seqs or 1)
    return pace.own.output_when_short.per_s(pace._others.output_when_short.per_s(prior))


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
        insort(self._queue, ticket, key=order)
        self._queued.setdefault(ticket.priority, WaitingLoad()).add_ticket(ticket)
        if self._queue[0] is ticket and self._can_begin(ticket, loads):
            self._release(ticket)
        return displaced
