"""A plain twin of admission, which loops over groups and lists instead of using arrays.

It shares only the estimates of speeds with the product (`quire.router.policies.speeds`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from math import inf

from quire.cluster.serving.admission import Admission
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Stage, Ticket, WaitingLoad
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
    """A plain `Capacity`, which learns the groups' speeds itself."""

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
        """Output tokens per second with all slots taken."""
        if state.max_num_seqs is None:
            return inf
        return self._per_s(state, "output_when_full", PRIOR_OUTPUT_PER_S * state.max_num_seqs)

    def short_per_s(self, state: GroupState) -> float:
        """Output tokens per second with free slots."""
        prior = PRIOR_OUTPUT_PER_S * (state.max_num_seqs or 1)
        return self._per_s(state, "output_when_short", prior)

    def _per_s(self, state: GroupState, name: str, prior: float) -> float:
        speeds = self._speeds.get(state.group) or Speeds(self._common)
        own: Rate = getattr(speeds.own, name)
        common: Rate = getattr(self._common, name)
        return own.per_s(common.per_s(prior))


class PlainQueue:
    """A plain `FairQueue` of lists, searched at each call."""

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []
        self.paid: list[Ticket] = []
        self._virtual: dict[tuple[int, str], float] = {}  # By priority and tenant, if any is live.
        self._last: dict[int, float] = {}  # Of the last released request, by priority.

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Ticket]:
        virtual, rest = dict(self._virtual), list(self.waiting)
        while rest:
            first = min(rest, key=lambda each: self._place(each, virtual))
            rest.remove(first)
            virtual[first.priority, first.tenant] += first.work / first.weight
            yield first

    @property
    def total(self) -> WaitingLoad:
        return self._sum(self.waiting)

    @property
    def first(self) -> Ticket | None:
        return next(iter(self), None)

    def first_that(self, allows: Callable[[Ticket], bool]) -> Ticket | None:
        waiting = list(self)
        firsts = [
            each
            for place, each in enumerate(waiting)
            if each.tenant not in [other.tenant for other in waiting[:place]]
        ]
        return next(filter(allows, firsts), None)

    def goes_first(self, ticket: Ticket) -> bool:
        if any(each.priority < ticket.priority for each in self.waiting):
            return False
        peers = [each for each in self.waiting if each.priority == ticket.priority]
        if any(each.tenant == ticket.tenant for each in peers):
            return False
        return all(
            self._start(ticket) < self._virtual[each.priority, each.tenant] for each in peers
        )

    def add(self, ticket: Ticket) -> None:
        name = (ticket.priority, ticket.tenant)
        if not self._queued_of(ticket):
            self._virtual[name] = self._start(ticket)
        self.waiting.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        self.waiting.remove(ticket)
        self._forget()

    def take(self, ticket: Ticket) -> None:
        self.waiting.remove(ticket)
        self.paid.append(ticket)
        virtual = self._virtual[ticket.priority, ticket.tenant]
        self._last[ticket.priority] = max(self._last.get(ticket.priority, 0.0), virtual)
        self._charge(ticket, ticket.work)

    def grew(self, ticket: Ticket) -> None:
        if ticket.num_done > ticket.charged:
            self._charge(ticket, ticket.num_done)

    def settle(self, ticket: Ticket) -> None:
        self._charge(ticket, ticket.num_done - ticket.charged)
        self.paid.remove(ticket)
        self._forget()

    def ahead_of(self, ticket: Ticket) -> WaitingLoad:
        ahead = self._sum([each for each in self.waiting if each.priority < ticket.priority])
        own = self._queued_of(ticket)
        turn = self._start(ticket)
        if own:
            name = (ticket.priority, ticket.tenant)
            turn = self._virtual[name] + _share(own)
        for tenant in {each.tenant for each in self.waiting if each.priority == ticket.priority}:
            queued = self._queued_of(ticket, tenant)
            reached = turn - self._virtual[ticket.priority, tenant]
            load = self._sum(queued)
            if tenant != ticket.tenant and reached < _share(queued):
                load = load.part(max(0.0, reached / _share(queued)))
            ahead = ahead.plus(load)
        return ahead

    def victims(self, ticket: Ticket) -> Iterator[Ticket]:
        rest = list(self.waiting)
        while lower := [each for each in rest if each.priority > ticket.priority]:
            lowest = max(each.priority for each in lower)
            yield self._last_of_fattest(rest, [each for each in lower if each.priority == lowest])
        own = [*self._queued_of(ticket), ticket]
        while peers := [
            each
            for each in rest
            if each.priority == ticket.priority and each.tenant != ticket.tenant
        ]:
            victim = self._last_of_fattest(rest, peers)
            queued = [each for each in (*rest, victim) if each.tenant == victim.tenant]
            if _share([each for each in queued if each.priority == ticket.priority]) <= _share(own):
                return
            yield victim

    def _last_of_fattest(self, rest: list[Ticket], peers: list[Ticket]) -> Ticket:
        def fatness(each: Ticket) -> tuple[float, int]:
            return _share([one for one in peers if one.tenant == each.tenant]), each.number

        victim = max(peers, key=fatness)
        rest.remove(victim)
        return victim

    def _charge(self, ticket: Ticket, work: float) -> None:
        ticket.charged += work
        self._virtual[ticket.priority, ticket.tenant] += work / ticket.weight

    def _start(self, ticket: Ticket) -> float:
        last = self._last.get(ticket.priority, 0.0)
        return max(self._virtual.get((ticket.priority, ticket.tenant), last), last)

    def _queued_of(self, ticket: Ticket, tenant: str | None = None) -> list[Ticket]:
        name = (ticket.priority, ticket.tenant if tenant is None else tenant)
        return [each for each in self.waiting if (each.priority, each.tenant) == name]

    def _forget(self) -> None:
        live = [*self.waiting, *self.paid]
        names = {(each.priority, each.tenant) for each in live}
        self._virtual = {name: each for name, each in self._virtual.items() if name in names}
        priorities = {each.priority for each in live}
        self._last = {name: each for name, each in self._last.items() if name in priorities}

    def _place(
        self, ticket: Ticket, virtual: dict[tuple[int, str], float]
    ) -> tuple[int, float, int]:
        return ticket.priority, virtual[ticket.priority, ticket.tenant], ticket.number

    def _sum(self, tickets: Sequence[Ticket]) -> WaitingLoad:
        return WaitingLoad(
            sum(each.num_requests for each in tickets),
            sum(each.num_prompt_tokens for each in tickets),
            sum(each.num_bytes for each in tickets),
        )


def _share(tickets: Sequence[Ticket]) -> float:
    return sum(each.work for each in tickets) / tickets[0].weight


class PlainAdmission(Admission):
    def __init__(self, config: AdmissionConfig, capacity: Capacity) -> None:
        super().__init__(config, capacity)
        self._queue = PlainQueue()  # type: ignore[assignment]

    def offer(self, ticket: Ticket, loads: Loads, *, now_s: float) -> list[Ticket]:
        displaced: list[Ticket] = []
        self._slots.at(now_s)
        self._set_work(ticket)
        if not self._begins(ticket, loads):
            displaced = self._make_room(ticket, loads, now_s)
            for victim in displaced:
                self.leave(victim)
        begins = self._begins(ticket, loads)
        self._num_offered += 1
        ticket.number = self._num_offered
        self._waiting.add(ticket.num_requests, ticket.num_prompt_tokens)
        ticket.stage = Stage.QUEUED
        self._slots.came(ticket)
        self._queue.add(ticket)
        if begins and self._queue.first is ticket:
            self._release(ticket)
        return displaced

    def _begins(self, ticket: Ticket, loads: Loads) -> bool:
        allowed = self._slots.allows(ticket, loads)
        return allowed and self._queue.goes_first(ticket) and self._can_begin(ticket, loads)
