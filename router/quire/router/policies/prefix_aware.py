"""The default policy: minimizes time to first token of this request and of those after it.

    cost   = queued + rest + (1.25 + behind) * missing + 24 * requests + adapter
    behind = min(12, (pending + missing / 16) / fresh)

All terms are of one group, in tokens, the time in which the group prefills one:

    queued    prompt tokens that it must compute first, less the completed part of its current step
    rest      the rest of that step: 24 per request in it, less the completed part
    missing   tokens of this prompt that are not cached, and will not be when it is their turn
    behind    delay of later requests, per token computed here
    pending   prompt tokens that it must compute, the current step included
    fresh     uncached prompt tokens per request, by any group: a recent mean
    requests  requests that share the step in which the prompt is computed
    adapter   cost of the request's LoRA adapter, if it has one

``behind`` is the marginal cost of work in a queue with random arrivals: work x behind work u costs
``u * x + x ** 2 / 2`` times the arrival rate, one request per ``fresh`` tokens of time. The
quadratic term is weighted 1/16 rather than 1/2, because a copy also benefits later requests. A
missing token weighs 1.25 rather than 1. Otherwise waiting for a prefix that one group is computing
would cost as much as computing it again elsewhere.

A prefix is replicated when its requests have lost too much time to having a single copy. Each
request adds to its prefix's *regret* the cost that another copy would have saved, averaged over the
other groups. Waiting for the prefix itself does not count, since another group would compute it no
sooner. When the sum reaches four times the cost of a copy (``patience``), the next request makes
the copy: the ski-rental rule. A prefix is named by a block in the second half of the part that the
other group lacks, so requests with the same name share at least half of that part.

Loading an adapter costs 48: more than a tie, so requests for one adapter gather where it is loaded.
If more adapters have requests than can be loaded, they take turns of 16 steps, and a step costs 24
per request in it. A request waits one turn for each set of loaded adapters before its own. So each
group serves its own set of adapters, rather than every group serving all in turn.

docs/decisions/0018-routing-policy.md says why each term is there and what else was tried.
"""

from dataclasses import dataclass

import numpy as np

from quire.router.policies.decide import TIE_TOKENS, nearest, tied
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, GroupState, Policy, Reason, RouteRequest
from quire.router.policies.replication import Regrets
from quire.worker.blocks.hashing import BlockHash


@dataclass(frozen=True, kw_only=True)
class PrefixAwareConfig:
    missing: float = 1.25
    """Weight of a missing token when no request waits."""
    request_tokens: float = 24.0
    """Delay that a request causes to others, in tokens of prefill."""
    load_tokens: float = 48.0
    """Delay of a step in which an adapter is loaded, in tokens of prefill."""
    turn_steps: float = 16.0
    """Steps for which an adapter runs before others do, see `quire.worker.parts.adapters.slots`."""
    meanwhile: float = 0.0625
    """Weight of the requests that arrive while the missing tokens are computed."""
    max_behind: float = 12.0
    """Upper bound of ``behind``: with a very long queue, later requests go elsewhere anyway."""
    first_fresh: float = 3072.0
    """Uncached tokens assumed per request at the start; counts as `fresh_prior` requests."""
    fresh_prior: int = 20
    fresh_memory: int = 200
    """Requests after which an observation of ``fresh`` counts for a third (1/e)."""
    min_fresh: float = 128.0
    max_fresh: float = 8192.0
    patience: float = 4.0
    """A copy is made when the summed regret reaches this many times its cost."""
    patience_memory: int = 1000
    """Requests per group after which a regret counts for a third (1/e)."""


class PrefixAware(Policy):
    """See the module's docstring. Each call of `costs` counts as one request."""

    reason: Reason = "least_loaded"

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config = config or PrefixAwareConfig()
        self._fresh = config.first_fresh
        self._num_seen = config.fresh_prior
        self._regrets = Regrets()
        self._memory_age = 0.0
        # The cost terms of the last `costs` that do not depend on the missing tokens.
        self._work: tuple[Column, Column] = np.empty(0), np.empty(0)

    def costs(self, request: RouteRequest, groups: Loads, hits: Column) -> Column:
        config, queued = self._config, groups.num_queued_tokens
        num_in_step = groups.num_running + groups.num_waiting
        rest = config.request_tokens * num_in_step
        rest = rest - groups.step_over(request.now_s) * (rest + groups.num_step_tokens)
        beside = config.request_tokens * (num_in_step + groups.num_reserved_requests)
        self.adapter_costs = self._adapter_costs(request.adapter, groups, num_in_step)
        if self.adapter_costs is not None:
            beside = beside + self.adapter_costs
        self._work = queued, rest + beside
        missing = request.num_prompt_tokens - hits
        costs = self._costs(missing)
        self.pressure = self._pressure(groups.states[int(costs.argmin())])
        self._see(float(missing.min()), len(groups))
        return costs

    def second_home(
        self, request: RouteRequest, groups: Loads, hits: Column, home: int, num_coming: int
    ) -> int:
        costs = self._costs(request.num_prompt_tokens - hits[home])  # If all had home's hit.
        if costs[home] <= costs.min() + TIE_TOKENS:
            return home
        ties = tied(hits, costs)
        sooner = ties[0]
        if hits[sooner] >= hits[home]:
            return home
        saved = np.maximum(costs[home] - num_coming - costs, 0.0).sum()
        copied = self._costs(request.num_prompt_tokens - hits[sooner])[sooner]
        is_paid = self._is_paid(
            _name(request, int(hits[sooner]), int(hits[home])),
            float(saved) / (len(costs) - 1),
            price=float(copied - costs[sooner]),
        )
        return nearest(request, groups, ties) if is_paid else home

    def _costs(self, missing: Column | float) -> Column:
        """Each group's cost for the last request, if the group lacks ``missing`` tokens."""
        config, (queued, other) = self._config, self._work
        behind = np.minimum((queued + config.meanwhile * missing) / self._fresh, config.max_behind)
        costs: Column = queued + other + (config.missing + behind) * missing
        return costs

    def _adapter_costs(self, adapter: str, groups: Loads, num_in_step: Column) -> Column | None:
        if not adapter:
            return None
        config = self._config
        is_cold = np.array([adapter not in state.adapters for state in groups.states])
        turns = np.array([state.turns(adapter) for state in groups.states])
        steps = config.turn_steps * turns
        costs: Column = config.load_tokens * is_cold + steps * config.request_tokens * num_in_step
        return costs

    def _is_paid(self, name: BlockHash | None, regret: float, *, price: float) -> bool:
        if name is None:
            return False
        if self._regrets.add(name, regret, at=self._memory_age) < self._config.patience * price:
            return False
        self._regrets.forget(name)
        return True

    def _pressure(self, state: GroupState) -> float:
        return min(state.num_queued_tokens / self._fresh, self._config.max_behind)

    def _see(self, num_fresh: float, num_groups: int) -> None:
        """Learns from a request with ``num_fresh`` tokens that no group has cached."""
        config = self._config
        self._num_seen = min(self._num_seen + 1, config.fresh_memory)
        self._memory_age += 1 / (config.patience_memory * num_groups)
        mean = self._fresh + (num_fresh - self._fresh) / self._num_seen
        self._fresh = min(max(mean, config.min_fresh), config.max_fresh)


def _name(request: RouteRequest, num_held: int, num_wanted: int) -> BlockHash | None:
    """Names the prefix that a group lacks when it holds ``num_held`` tokens of the prompt."""
    begin = num_held // request.block_size
    end = min(num_wanted // request.block_size, len(request.hashes))
    if end <= begin:
        return None
    return request.hashes[begin + (1 << ((end - begin).bit_length() - 1)) - 1]
