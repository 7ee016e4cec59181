"""Orders the requests that wait at a gateway: by priority, then in weighted fair shares of the
tenants, then by arrival.

Each tenant has a *virtual time* within a priority: the work of its released requests over its
weight. The tenant with the least goes next (start-time fair queueing, Goyal et al. 1996; work is
counted as in Sheng et al., Fairness in Serving Large Language Models, 2024). A tenant that begins
to wait starts at the virtual time of the request released last, so that it saves up no share while
it sends nothing. One tenant alone is served in order of arrival.

Work is prompt tokens plus output tokens times `OUTPUT_WORK`. The work of a request is not known
when it is released. Its tenant is therefore charged the expected work at first, more when the
output outgrows that, and the exact work at the request's end. So running requests count in their
tenant's share.

Calls take O(log n), except four that visit each waiting tenant: `FairQueue.ahead_of`, which only a
limit of the wait needs, `FairQueue.victims` for more than one victim, `FairQueue.first_that` if the
first ticket's tenant has its share of slots, and iteration.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import takewhile

from quire.cluster.features.tenants.lazy_heap import LazyHeap
from quire.cluster.serving.ticket import Ticket, WaitingLoad

OUTPUT_WORK = 4.0
"""Work of an output token, in prompt tokens. It takes a slot for a whole step, while a step
computes hundreds of prompt tokens. Public price lists charge four to five times as much for it."""


class _Flow:
    """One tenant's requests of one priority, while any of them waits or runs."""

    __slots__ = ("load", "num_live", "queued", "tenant", "virtual", "weight", "work")

    def __init__(self, tenant: str, virtual: float) -> None:
        self.tenant = tenant
        self.virtual = virtual
        self.weight = 1.0
        self.queued: OrderedDict[Ticket, None] = OrderedDict()
        self.load = WaitingLoad()
        self.work = 0.0  # Sum over the waiting requests.
        self.num_live = 0

    @property
    def first(self) -> Ticket:
        return next(iter(self.queued))

    @property
    def last(self) -> Ticket:
        return next(reversed(self.queued))

    @property
    def share(self) -> float:
        """The waiting work over the tenant's weight."""
        return self.work / self.weight


class _Class:
    """The requests of one priority."""

    __slots__ = ("fattest", "flows", "load", "virtual", "waiting")

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        self.waiting: LazyHeap[str] = LazyHeap()  # Tenants, by virtual time and arrival.
        self.fattest: LazyHeap[str] = LazyHeap()  # Tenants, by waiting work over weight.
        self.load = WaitingLoad()
        self.virtual = 0.0  # The virtual time of the request released last.

    def start(self, tenant: str) -> float:
        """The virtual time at which a tenant without waiting requests begins to wait."""
        flow = self.flows.get(tenant)
        return self.virtual if flow is None else max(flow.virtual, self.virtual)

    def place(self, flow: _Flow) -> None:
        """Updates a tenant's places in both heaps, by its virtual time and its waiting work."""
        if flow.queued:
            self.waiting.put(flow.tenant, (flow.virtual, flow.first.number))
            self.fattest.put(flow.tenant, (-flow.share, -flow.last.number))
        else:
            self.waiting.discard(flow.tenant)
            self.fattest.discard(flow.tenant)


class FairQueue:
    """The waiting tickets in order, and the work that each tenant has been charged. It decides only
    the order."""

    def __init__(self) -> None:
        self.total = WaitingLoad()
        """Sums over the waiting tickets."""
        self._classes: dict[int, _Class] = {}
        self._waiting: LazyHeap[int] = LazyHeap()  # Priorities.
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Ticket]:
        """The waiting tickets in the order in which they will be released if no other arrives and
        each costs its expected work."""
        for priority in sorted(self._waiting):
            yield from _in_turn(self._classes[priority])

    @property
    def first(self) -> Ticket | None:
        """The next ticket to be released; ``None`` if none waits."""
        found = self._waiting.least()
        if found is None:
            return None
        class_ = self._classes[found[1]]
        least = class_.waiting.least()
        assert least is not None, "a waiting priority has a waiting tenant"
        return class_.flows[least[1]].first

    def first_that(self, allows: Callable[[Ticket], bool]) -> Ticket | None:
        """The next ticket to be released of the tenants whose next ticket ``allows`` admits. A
        tenant's next ticket is of its highest priority: its others would keep a large one out."""
        first = self.first
        if first is None or allows(first):
            return first
        refused: set[str] = set()
        for priority in sorted(self._waiting):
            class_ = self._classes[priority]
            flows = [class_.flows[tenant] for tenant in class_.waiting if tenant not in refused]
            allowed = [each for each in flows if allows(each.first)]
            if allowed:
                return min(allowed, key=lambda each: (each.virtual, each.first.number)).first
            refused.update(each.tenant for each in flows)
        return None

    def goes_first(self, ticket: Ticket) -> bool:
        """Whether ``ticket``, which is not in the queue yet, would be released next."""
        found = self._waiting.least()
        if found is None or found[1] > ticket.priority:
            return True
        if found[1] < ticket.priority:
            return False
        class_ = self._classes[ticket.priority]
        flow, least = class_.flows.get(ticket.tenant), class_.waiting.least()
        assert least is not None
        return not (flow and flow.queued) and class_.start(ticket.tenant) < least[0][0]

    def add(self, ticket: Ticket) -> None:
        """Adds a ticket, after the others of its tenant and priority."""
        class_ = self._classes.setdefault(ticket.priority, _Class())
        flow = class_.flows.get(ticket.tenant)
        if flow is None:
            flow = class_.flows[ticket.tenant] = _Flow(ticket.tenant, class_.virtual)
        elif not flow.queued:
            flow.virtual = class_.start(ticket.tenant)
        flow.weight = ticket.weight
        flow.num_live += 1
        flow.queued[ticket] = None
        flow.work += ticket.work
        for load in (flow.load, class_.load, self.total):
            load.add_ticket(ticket)
        self._num += 1
        class_.place(flow)
        self._waiting.put(ticket.priority, ticket.priority)

    def remove(self, ticket: Ticket) -> None:
        """Removes a waiting ticket. Its tenant is charged nothing."""
        class_, flow = self._dequeue(ticket)
        self._drop(ticket.priority, class_, flow)

    def take(self, ticket: Ticket) -> None:
        """Removes a ticket that is released, and charges its tenant the expected work. `settle`
        must follow."""
        class_, flow = self._dequeue(ticket)
        class_.virtual = max(class_.virtual, flow.virtual)
        self._charge(class_, flow, ticket, ticket.work)

    def grew(self, ticket: Ticket) -> None:
        """Notes that `Ticket.num_done` of a released ticket grew. If it exceeds the charge, the
        charge grows by as much as was done, so that it is about twice that."""
        if ticket.num_done > ticket.charged:
            class_ = self._classes[ticket.priority]
            self._charge(class_, class_.flows[ticket.tenant], ticket, ticket.num_done)

    def settle(self, ticket: Ticket) -> None:
        """Corrects the charge for a released ticket that has ended to the work done for it."""
        class_ = self._classes[ticket.priority]
        flow = class_.flows[ticket.tenant]
        self._charge(class_, flow, ticket, ticket.num_done - ticket.charged)
        self._drop(ticket.priority, class_, flow)

    def ahead_of(self, ticket: Ticket) -> WaitingLoad:
        """The requests that will be released before ``ticket``, which is not in the queue yet, if
        no other arrives: all of higher priority, all of its own tenant, and of each other tenant
        the part that its share reaches by then."""
        ahead = WaitingLoad()
        for priority in takewhile(lambda each: each < ticket.priority, sorted(self._waiting)):
            ahead = ahead.plus(self._classes[priority].load)
        class_ = self._classes.get(ticket.priority)
        if class_ is None:
            return ahead
        own = class_.flows.get(ticket.tenant)
        turn = class_.start(ticket.tenant)
        if own is not None and own.queued:
            turn = own.virtual + own.share
        for tenant in class_.waiting:
            flow = class_.flows[tenant]
            reached = turn - flow.virtual
            is_all = flow is own or reached >= flow.share
            part = 1.0 if is_all else max(0.0, reached / flow.share)
            ahead = ahead.plus(flow.load if is_all else flow.load.part(part))
        return ahead

    def victims(self, ticket: Ticket) -> Iterator[Ticket]:
        """Yields the tickets that may be displaced for ``ticket``, in this order: those of lower
        priorities, the lowest first, then those of its own. Within a priority, the tenant with the
        most waiting work over its weight loses its last ticket; in the ticket's own priority only
        while that is more than the ticket's tenant has with it. The queue must not change during
        the iteration."""
        for priority in sorted(self._waiting, reverse=True):
            if priority < ticket.priority:
                return
            class_, least_share, own = self._classes[priority], 0.0, None
            if priority == ticket.priority:
                own = class_.flows.get(ticket.tenant)
                least_share = ((own.work if own else 0.0) + ticket.work) / ticket.weight
            found = class_.fattest.least()
            assert found is not None, "a waiting priority has a waiting tenant"
            flow = class_.flows[found[1]]
            if flow is own or flow.share <= least_share:
                return
            # One is nearly always enough. All tenants are visited only for further ones.
            yield flow.last
            further = _fattest_first(class_, least_share, own)
            next(further)
            yield from further

    def _charge(self, class_: _Class, flow: _Flow, ticket: Ticket, work: float) -> None:
        ticket.charged += work
        flow.virtual += work / flow.weight
        class_.place(flow)

    def _dequeue(self, ticket: Ticket) -> tuple[_Class, _Flow]:
        class_ = self._classes[ticket.priority]
        flow = class_.flows[ticket.tenant]
        del flow.queued[ticket]
        flow.work = flow.work - ticket.work if flow.queued else 0.0
        for load in (flow.load, class_.load, self.total):
            load.remove_ticket(ticket)
        self._num -= 1
        class_.place(flow)
        if not class_.waiting:
            self._waiting.discard(ticket.priority)
        return class_, flow

    def _drop(self, priority: int, class_: _Class, flow: _Flow) -> None:
        """Notes that a ticket of the tenant has left, and forgets the tenant after its last one."""
        flow.num_live -= 1
        if not flow.num_live:
            del class_.flows[flow.tenant]
        if not class_.flows:
            del self._classes[priority]


def _fattest_first(class_: _Class, least_share: float, spared: _Flow | None) -> Iterator[Ticket]:
    """Yields the last ticket of the tenant with the most waiting work over its weight, repeatedly,
    while that is more than ``least_share``; none of ``spared``."""
    shares = [
        (-flow.share, -flow.last.number, tenant)
        for tenant, flow in ((each, class_.flows[each]) for each in class_.waiting)
        if flow is not spared and flow.share > least_share
    ]
    heapify(shares)
    rests = {tenant: list(class_.flows[tenant].queued) for _, _, tenant in shares}
    while shares and -shares[0][0] > least_share:
        share, _, tenant = shares[0]
        victim = rests[tenant].pop()
        yield victim
        if rests[tenant]:
            then = share + victim.work / class_.flows[tenant].weight
            heapreplace(shares, (then, -rests[tenant][-1].number, tenant))
        else:
            heappop(shares)


def _in_turn(class_: _Class) -> Iterator[Ticket]:
    turns = [
        (flow.virtual, flow.first.number, tenant)
        for tenant, flow in ((each, class_.flows[each]) for each in class_.waiting)
    ]
    heapify(turns)
    rests = {tenant: list(reversed(class_.flows[tenant].queued)) for _, _, tenant in turns}
    while turns:
        virtual, _, tenant = turns[0]
        ticket = rests[tenant].pop()
        yield ticket
        if rests[tenant]:
            then = virtual + ticket.work / class_.flows[tenant].weight
            heapreplace(turns, (then, rests[tenant][-1].number, tenant))
        else:
            heappop(turns)
