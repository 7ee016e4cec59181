"""Which requests are taken, which wait at the gateway, and which are refused at once.

A request is *released* to the groups when one of them can begin it within ``max_group_wait_s``. A
request that waits at a group can no longer be reordered, so only enough are released to keep the
groups busy until their next frames. The others wait here, by priority, then in fair shares of their
tenants and then in order of arrival (`FairQueue`), for as long as their clients do. Where
``max_queue_wait_s`` is set, a request whose predicted wait exceeds it or its own deadline is
refused before it costs anything. Admitted requests are never delayed by later ones of the same
tenant and priority. Later ones of another tenant delay them as far as that tenant is below its
share.

Always true: a request that could be released waits only behind one that could not; the queue is
within its bounds; each request of lower priority waits behind each of higher priority; the requests
of one tenant and priority are released in order of arrival.

A request of higher priority may displace ones of lower, the last first, where it could not be taken
otherwise; one of the same priority displaces the last of the tenant with the most waiting work over
its weight, where that is more than its own tenant would have. There is no aging: under lasting
overload low priorities are refused, not left to starve.
"""

from math import inf

from quire.cluster.errors import Overloaded, RefusalReason
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.fair_queue import OUTPUT_WORK, FairQueue
from quire.cluster.serving.ticket import Queued, Stage, Ticket, WaitingLoad
from quire.router.policies.loads import Loads

_MAX_RETRY_AFTER_S = 60.0
_PAID = (Stage.RELEASED, Stage.ROUTED, Stage.BEGUN)
"""When a request's tenant has been charged."""


class Admission:
    """The queue of one gateway. Decides and executes nothing; ``loads`` are the groups' as the
    next routing decision will see them."""

    def __init__(self, config: AdmissionConfig, capacity: Capacity) -> None:
        self._config = config
        self._capacity = capacity
        self._queue = FairQueue()
        self._unrouted = WaitingLoad()
        self._waiting = WaitingLoad()  # All that no group has begun.
        self._num_offered = 0

    @property
    def queued(self) -> list[Ticket]:
        """Those that wait here, in the order in which they will be released. For looking at all;
        `queued_load` has the sums."""
        return list(self._queue)

    @property
    def queued_load(self) -> WaitingLoad:
        """Sums over those that wait here; not the caller's to change."""
        return self._queue.total

    @property
    def unbegun(self) -> Queued:
        """Sums over the requests that no group has begun; zero when there are none."""
        return Queued(self._waiting.num_requests, self._waiting.num_tokens)

    def offer(self, ticket: Ticket, loads: Loads, *, now_s: float) -> list[Ticket]:
        """Releases or queues a new request; returns those that it displaced, which have left.

        Raises:
            Overloaded: It is refused; nothing has changed.
        """
        displaced: list[Ticket] = []
        self._set_work(ticket)
        begins = self._queue.goes_first(ticket) and self._can_begin(ticket, loads)
        if not begins:
            displaced = self._make_room(ticket, loads, now_s)
            for victim in displaced:
                self.leave(victim)
        self._num_offered += 1
        ticket.number = self._num_offered
        self._waiting.add(ticket.num_requests, ticket.num_prompt_tokens)
        ticket.stage = Stage.QUEUED
        self._queue.add(ticket)
        if begins:
            self._release(ticket)
        return displaced

    def check(
        self, priority: int, loads: Loads, *, now_s: float, tenant: str = "", weight: float = 1.0
    ) -> None:
        """Refuses early what `offer` would refuse whatever its size: before it costs anything.

        Raises:
            Overloaded: Not even a prompt of one token would be taken.
        """
        if self._queue:
            least = Ticket(num_prompt_tokens=0, priority=priority, tenant=tenant, weight=weight)
            self._make_room(least, loads, now_s)

    def make_way(
        self, ticket: Ticket, loads: Loads, *, num_requests: int, now_s: float
    ) -> list[Ticket]:
        """Displaces waiting requests of ``num_requests`` or more completions, as `offer` of
        ``ticket`` might, and returns them; none where too few wait that yield to it.

        Raises:
            Overloaded: `offer` would refuse it all the same; nothing has changed.
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

    def release(self, loads: Loads) -> list[Ticket]:
        """Releases those whose turn has come. To be called when the groups' load has changed."""
        released = []
        while (first := self._queue.first) is not None and self._can_begin(first, loads):
            released.append(first)
            self._release(first)
        return released

    def routed(self, ticket: Ticket) -> None:
        """From now on, a released request is in the groups' states."""
        if ticket.stage is Stage.RELEASED:
            self._unrouted.remove_ticket(ticket)
            ticket.stage = Stage.ROUTED

    def took(self, ticket: Ticket, *, num_tokens: int) -> None:
        """``num_tokens`` more of its output came. The first show that a group has begun it."""
        self.begun(ticket)
        if ticket.stage is Stage.BEGUN:
            ticket.num_done += OUTPUT_WORK * num_tokens
            self._queue.grew(ticket)

    def began_cached(self, ticket: Ticket, *, num_cached_tokens: int) -> None:
        """A group had so many of a prompt's tokens in its cache, which therefore cost nothing."""
        if ticket.stage in _PAID:
            ticket.num_done = max(0.0, ticket.num_done - num_cached_tokens)

    def begun(self, ticket: Ticket) -> None:
        """A group has begun it."""
        self.routed(ticket)
        if ticket.stage is Stage.ROUTED:
            self._waiting.add(-ticket.num_requests, -ticket.num_prompt_tokens)
            ticket.stage = Stage.BEGUN

    def leave(self, ticket: Ticket) -> None:
        """It has ended, or waits no longer. May be called again."""
        if ticket.stage in (Stage.NEW, Stage.LEFT):
            return
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
        """Whether a group begins it soon, behind the released requests that no group state shows
        yet."""
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
        """Whether the queue would be too full with ``ticket``, or its last wait for too long."""
        config = self._config
        if not queued.num_requests:
            return False
        return (
            queued.num_requests + ticket.num_requests > config.max_queued_requests
            or queued.num_bytes + ticket.num_bytes > config.max_queued_bytes
            or (bool(loads) and not self._is_bearable(ticket, loads, queued.plus(self._unrouted)))
        )

    def _is_bearable(self, ticket: Ticket, loads: Loads, ahead: WaitingLoad) -> bool:
        """Whether one request behind ``ahead`` waits for no longer than the bound."""
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
        # The other gateways, which are not seen, are taken to have as much ahead of theirs.
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
        """``too_short_s``: a wait within which the request was found not to begin."""
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
            "queue_full": f"{waits} and take up {ahead.num_bytes} bytes: --max-queued-requests is "
            f"{config.max_queued_requests}, --max-queued-bytes {config.max_queued_bytes}",
        }[reason]
        return Overloaded(
            f"{why}; try again in {retry_after_s:.0f} s", reason=reason, retry_after_s=retry_after_s
        )

    def _set_work(self, ticket: Ticket) -> None:
        num_output = min(self._capacity.mean_output, ticket.max_tokens or inf)
        # In whole numbers, whose sums do not depend on their order.
        each = round(OUTPUT_WORK * num_output)
        ticket.work = float(ticket.num_prompt_tokens + each * ticket.num_requests)

    def _release(self, ticket: Ticket) -> None:
        self._queue.take(ticket)
        ticket.num_done = float(ticket.num_prompt_tokens)
        self._unrouted.add_ticket(ticket)
        ticket.stage = Stage.RELEASED
