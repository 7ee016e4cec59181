"""Decides which requests are released to groups, which wait at the gateway, and which are refused.

A request is *released* to the groups when one of them can begin it within ``max_group_wait_s``. A
request that waits at a group can no longer be reordered, so only enough are released to keep the
groups busy until their next frames. While several tenants are active, each has no more than its
share of the groups' slots (`SlotShares`). The others wait at the gateway, by priority, then in fair
shares of their tenants and then in order of arrival (`FairQueue`), for as long as their clients do.
If ``max_queue_wait_s`` is set, a request whose predicted wait exceeds it or its own deadline is
refused before it costs anything. Admitted requests are never delayed by later ones of the same
tenant and priority. Later requests of another tenant delay them only while that tenant is below its
share.

Always true: a request that could be released waits only behind one that could not; the queue is
within its bounds; each request of lower priority waits behind each of higher priority, unless that
one's tenant has its share of slots; the requests of one tenant and priority are released in order
of arrival.

A request that does not fit may displace waiting ones: first requests of lower priority, the last
one first; then, within its own priority, the last request of the tenant with the most waiting work
over its weight, if that is more than its own tenant would have. There is no aging: under lasting
overload low priorities are refused, not left to starve.
"""

from functools import partial
from math import inf

from quire.cluster.errors import Overloaded, RefusalReason
from quire.cluster.features.tenants.fair_queue import OUTPUT_WORK, FairQueue
from quire.cluster.features.tenants.slot_shares import SlotShares
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Queued, Stage, Ticket, WaitingLoad
from quire.router.policies.loads import Loads

_MAX_RETRY_AFTER_S = 60.0
_PAID = (Stage.RELEASED, Stage.ROUTED, Stage.BEGUN)
"""Stages in which a request's tenant has been charged for it."""


class Admission:
    """The admission decisions of one gateway, which the caller executes. ``loads`` are the groups'
    loads as the next routing decision will see them."""

    def __init__(self, config: AdmissionConfig, capacity: Capacity) -> None:
        self._config = config
        self._capacity = capacity
        self._queue = FairQueue()
        self._slots = SlotShares()
        self._unrouted = WaitingLoad()
        self._waiting = WaitingLoad()  # Sums over the requests that no group has begun.
        self._num_offered = 0

    @property
    def queued(self) -> list[Ticket]:
        """The waiting requests in the order in which they will be released. Takes a pass over all
        of them; `queued_load` has the sums."""
        return list(self._queue)

    @property
    def queued_load(self) -> WaitingLoad:
        """Sums over the waiting requests; the caller must not change them."""
        return self._queue.total

    @property
    def unbegun(self) -> Queued:
        """Sums over the requests that no group has begun."""
        return Queued(self._waiting.num_requests, self._waiting.num_tokens)

    def offer(self, ticket: Ticket, loads: Loads, *, now_s: float) -> list[Ticket]:
        """Releases or queues a new request; returns the requests that it displaced, which have
        left the queue.

        Raises:
            Overloaded: The request is refused; nothing has changed.
        """
        displaced: list[Ticket] = []
        self._slots.at(now_s)
        self._set_work(ticket)
        begins = (
            self._queue.goes_first(ticket)
            and self._slots.allows(ticket, loads)
            and self._can_begin(ticket, loads)
        )
        if not begins:
            displaced = self._make_room(ticket, loads, now_s)
            for victim in displaced:
                self.leave(victim)
        self._num_offered += 1
        ticket.number = self._num_offered
        self._waiting.add(ticket.num_requests, ticket.num_prompt_tokens)
        ticket.stage = Stage.QUEUED
        self._slots.came(ticket)
        self._queue.add(ticket)
        if begins:
            self._release(ticket)
        return displaced

    def check(
        self, priority: int, loads: Loads, *, now_s: float, tenant: str = "", weight: float = 1.0
    ) -> None:
        """Checks whether `offer` would refuse a request whatever its size, before it is tokenized.

        Raises:
            Overloaded: Not even a prompt of one token would be accepted.
        """
        if self._queue:
            least = Ticket(num_prompt_tokens=0, priority=priority, tenant=tenant, weight=weight)
            self._make_room(least, loads, now_s)

    def make_way(
        self, ticket: Ticket, loads: Loads, *, num_requests: int, now_s: float
    ) -> list[Ticket]:
        """Displaces waiting requests of at least ``num_requests`` completions in favor of
        ``ticket``, by the rules of `offer`, and returns them; none if too few can be displaced.

        Raises:
            Overloaded: `offer` would refuse ``ticket`` anyway; nothing has changed.
        """
        self._set_work(ticket)
        self._make_room(ticket, loads, now_s)
        victims, num_left = [], num_requests
        for victim in self._queue.victims(ticket):
            victims.append(victim)
            num_left -= victim.num_requests
            if num_left <= 0:
                for each in victims:
                    self.leave(each)
                return victims
        return []

    def release(self, loads: Loads, *, now_s: float = 0.0) -> list[Ticket]:
        """Releases and returns the requests that groups can begin now, in order. Call it when the
        groups' load has changed, and after `offer` has queued a request."""
        self._slots.at(now_s)
        allows = partial(self._slots.allows, loads=loads)
        released = []
        while (first := self._queue.first_that(allows)) and self._can_begin(first, loads):
            released.append(first)
            self._release(first)
        return released

    def routed(self, ticket: Ticket) -> None:
        """Notes that ``loads`` include a released request from now on."""
        if ticket.stage is Stage.RELEASED:
            self._unrouted.remove_ticket(ticket)
            ticket.stage = Stage.ROUTED

    def took(self, ticket: Ticket, *, num_tokens: int) -> None:
        """Counts ``num_tokens`` more output tokens. The first show that a group has begun it."""
        self.begun(ticket)
        if ticket.stage is Stage.BEGUN:
            ticket.num_done += OUTPUT_WORK * num_tokens
            self._queue.grew(ticket)

    def began_cached(self, ticket: Ticket, *, num_cached_tokens: int) -> None:
        """Notes that a group found ``num_cached_tokens`` of a prompt in its cache, which cost
        nothing."""
        if ticket.stage in _PAID:
            ticket.num_done = max(0.0, ticket.num_done - num_cached_tokens)

    def begun(self, ticket: Ticket) -> None:
        """Notes that a group has begun the request."""
        self.routed(ticket)
        if ticket.stage is Stage.ROUTED:
            self._waiting.add(-ticket.num_requests, -ticket.num_prompt_tokens)
            ticket.stage = Stage.BEGUN

    def leave(self, ticket: Ticket) -> None:
        """Removes a request that has ended or waits no longer. Repeated calls have no effect."""
        if ticket.stage in (Stage.NEW, Stage.LEFT):
            return
        self._slots.left(ticket, was_released=ticket.stage is not Stage.QUEUED)
        if ticket.stage is Stage.QUEUED:
            self._queue.remove(ticket)
        else:
            self._queue.settle(ticket)
        if ticket.stage is Stage.RELEASED:
            self._unrouted.remove_ticket(ticket)
        if ticket.stage is not Stage.BEGUN:
            self._waiting.add(-ticket.num_requests, -ticket.num_prompt_tokens)
        ticket.stage = Stage.LEFT

    def _can_begin(self, ticket: Ticket, loads: Loads) -> bool:
        """Whether a group can begin the request within ``max_group_wait_s``, after the released
        requests that ``loads`` do not include yet."""
        wait_s = self._config.max_group_wait_s
        return self._begins_within(wait_s, ticket, loads, ahead=self._unrouted)

    def _make_room(self, ticket: Ticket, loads: Loads, now_s: float) -> list[Ticket]:
        """The requests that must be displaced to queue ``ticket``. Raises Overloaded."""
        bound_s = self._config.max_queue_wait_s
        if loads and bound_s < inf:
            ahead = self._queue.ahead_of(ticket).plus(self._unrouted)
            if not self._is_bearable(ticket, loads, ahead):
                raise self._refusal("wait", ticket, loads, ahead, too_short_s=bound_s)
            time_s = max(0.0, ticket.deadline_s - now_s)
            if not self._begins_within(time_s, ticket, loads, ahead=ahead):
                raise self._refusal("deadline", ticket, loads, ahead, too_short_s=time_s)
        victims: list[Ticket] = []
        rest = self._queue.total.plus(WaitingLoad())
        if not self._exceeds_bounds(ticket, loads, rest):
            return victims
        for victim in self._queue.victims(ticket):
            victims.append(victim)
            rest.remove_ticket(victim)
            if not self._exceeds_bounds(ticket, loads, rest):
                return victims
        raise self._refusal("queue_full", ticket, loads, rest)

    def _exceeds_bounds(self, ticket: Ticket, loads: Loads, queued: WaitingLoad) -> bool:
        """Whether with ``ticket`` the queue would be too full, or its last request would wait too
        long."""
        config = self._config
        if not queued.num_requests:
            return False
        return (
            queued.num_requests + ticket.num_requests > config.max_queued_requests
            or queued.num_bytes + ticket.num_bytes > config.max_queued_bytes
            or (bool(loads) and not self._is_bearable(ticket, loads, queued.plus(self._unrouted)))
        )

    def _is_bearable(self, ticket: Ticket, loads: Loads, ahead: WaitingLoad) -> bool:
        """Whether a request behind ``ahead`` waits no longer than ``max_queue_wait_s``."""
        config = self._config
        if config.max_queue_wait_s == inf:
            return True
        num_sent = loads.num_reserved_requests.sum() + ahead.num_requests
        num_waiting = loads.num_waiting.sum() + loads.most_gateways * num_sent
        if num_waiting < len(loads) * config.min_queued_per_group:
            return True
        return self._begins_within(config.max_queue_wait_s, ticket, loads, ahead=ahead)

    def _begins_within(
        self, wait_s: float, ticket: Ticket, loads: Loads, *, ahead: WaitingLoad
    ) -> bool:
        if wait_s == inf:
            return True
        # The queues of the other gateways are not visible; they are assumed to be equally long.
        need = ahead.num_requests * loads.most_gateways + 1.0
        tokens_each = ahead.tokens_each_with(ticket)
        return self._capacity.room(loads, wait_s=wait_s, tokens_each=tokens_each) >= need

    def _refusal(
        self,
        reason: RefusalReason,
        ticket: Ticket,
        loads: Loads,
        ahead: WaitingLoad,
        *,
        too_short_s: float = 0.0,
    ) -> Overloaded:
        """The error, with the predicted wait. ``too_short_s``: a wait within which the request was
        found not to begin."""
        config, tokens_each = self._config, ahead.tokens_each_with(ticket)
        predicted_s = retry_after_s = 1.0
        if loads:
            room = self._capacity.room(loads, wait_s=too_short_s, tokens_each=tokens_each)
            need = ahead.num_requests * loads.most_gateways + 1
            per_s = self._capacity.begun_per_s(loads, tokens_each=tokens_each)
            predicted_s = too_short_s + max(0.0, need - room) / per_s
            allowed_s = config.max_queue_wait_s if reason == "wait" else 0.0
            retry_after_s = min(max(predicted_s - allowed_s, 1.0), _MAX_RETRY_AFTER_S)
        waits = f"{ahead.num_requests} requests wait here"
        begins = f"{waits}, and this one would begin in about {predicted_s:.1f} s"
        why = {
            "wait": f"{begins}: --max-queue-wait-s is {config.max_queue_wait_s:g}",
            "deadline": f"{begins}, after its deadline: give it more time",
            # Without their bytes: from one refusal to the next they reveal a request's length.
            "queue_full": f"{waits}, as many or as large as may: --max-queued-requests is "
            f"{config.max_queued_requests}, --max-queued-bytes {config.max_queued_bytes}",
        }[reason]
        return Overloaded(
            f"{why}; try again in {retry_after_s:.0f} s", reason=reason, retry_after_s=retry_after_s
        )

    def _set_work(self, ticket: Ticket) -> None:
        num_output = min(self._capacity.mean_output, ticket.max_tokens or inf)
        # Whole numbers: sums of them do not depend on the order.
        each = round(OUTPUT_WORK * num_output)
        ticket.work = float(ticket.num_prompt_tokens + each * ticket.num_requests)

    def _release(self, ticket: Ticket) -> None:
        self._queue.take(ticket)
        self._slots.released(ticket)
        ticket.num_done = float(ticket.num_prompt_tokens)
        self._unrouted.add_ticket(ticket)
        ticket.stage = Stage.RELEASED
