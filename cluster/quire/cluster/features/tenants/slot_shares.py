"""Limits how many of the groups' slots one tenant's requests take while other tenants are active.

A step takes longer the more sequences it has, and so does the gateway's work for it. A tenant with
hundreds of clients would otherwise fill all slots that others leave free, and slow down each token
of these others. So while several tenants are active, each may have twice its weighted share of the
slots in progress: with less, groups fall idle between two of its requests, bursts of light tenants
wait, and shares of few slots are not as the weights (`test_fair_shares`). What the others do not
use beyond that stays free. A tenant alone may take all slots.

Slots can outnumber what the hardware computes at once: on CPUs, each sequence makes a step longer.
So, while several tenants have requests in progress, one tenant's sequences take no more than its
weighted share of the time of a step, as far as that time depends on the number of sequences.
"""

from dataclasses import dataclass
from math import ceil, inf

from quire.cluster.serving.ticket import Ticket
from quire.router.policies.loads import Loads

_ACTIVE_S = 1.0
"""A tenant is active until this long after its last request."""
_SLACK = 2.0
_EVERY_S = 0.05
"""How often the sum of the active tenants' weights is computed again: there may be thousands."""


@dataclass(slots=True)
class _Tenant:
    weight: float = 1.0
    num_live: int = 0
    """Requests that wait or run."""
    num_running: int = 0
    """Completions that were released to groups and have not ended."""
    seen_s: float = -inf


class SlotShares:
    """The slots that tenants' requests take, as one gateway sees them."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._now_s = self._summed_s = -inf
        self._weights = 0.0

    def at(self, now_s: float) -> None:
        """Sets the time for all further calls."""
        self._now_s = max(self._now_s, now_s)

    def came(self, ticket: Ticket) -> None:
        if ticket.tenant not in self._tenants:
            self._summed_s = -inf
        tenant = self._tenants.setdefault(ticket.tenant, _Tenant())
        tenant.weight = ticket.weight
        tenant.num_live += 1
        tenant.seen_s = self._now_s

    def released(self, ticket: Ticket) -> None:
        self._tenants[ticket.tenant].num_running += ticket.num_requests

    def left(self, ticket: Ticket, *, was_released: bool) -> None:
        tenant = self._tenants[ticket.tenant]
        tenant.num_live -= 1
        tenant.num_running -= ticket.num_requests * was_released
        tenant.seen_s = self._now_s

    def allows(self, ticket: Ticket, loads: Loads) -> bool:
        """Whether the ticket's tenant may have its completions in progress too. One without any may
        always have one request."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None or not tenant.num_running:
            return True
        share = tenant.weight / max(self._sum_of_weights(), tenant.weight)
        slots = float(loads.max_num_seqs.sum()) / loads.most_gateways
        if share == 1 or slots == inf:
            return True
        most = min(ceil(_SLACK * share * slots), self._share_of_step(tenant, loads))
        # A few in any case: a small burst of a light tenant harms nobody.
        return tenant.num_running + ticket.num_requests <= max(most, len(loads) + 1)

    def _share_of_step(self, tenant: _Tenant, loads: Loads) -> float:
        """How many completions of ``tenant`` take its share of the time of a step. The time that a
        step takes in any case counts for none."""
        others = [
            each for each in self._tenants.values() if each.num_running and each is not tenant
        ]
        if loads.step_parts is None or not others:
            return inf
        fixed_s, each_s = loads.step_parts
        num_fixed = fixed_s / each_s * len(loads) / loads.most_gateways if each_s else inf
        num_others = sum(each.num_running for each in others)
        return tenant.weight / sum(each.weight for each in others) * (num_fixed + num_others)

    def _sum_of_weights(self) -> float:
        """The weights of the active tenants; forgets the others."""
        if self._now_s - self._summed_s >= _EVERY_S:
            self._summed_s = self._now_s
            self._tenants = {
                name: each
                for name, each in self._tenants.items()
                if each.num_live or self._now_s - each.seen_s < _ACTIVE_S
            }
            self._weights = sum(each.weight for each in self._tenants.values())
        return self._weights
