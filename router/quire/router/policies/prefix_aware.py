"""Our policy: the least time to first token, for this request and for those that come after it.

    cost   = queued + rest + (1.25 + behind) * missing + 24 * requests
    behind = min(12, (pending + missing / 16) / fresh)

all of one group, in tokens, the time in which it prefills one:

    queued    prompt tokens that it must compute first, less what is over of its running step
    rest      what else is left of that step: 24 for each request in it, less what is over
    missing   the prompt's own tokens that it has not cached, and will not have when it gets there
    behind cost of a token computed there for later requests, which start a token later
    pending   prompt tokens that it must compute, the running step included
    fresh     prompt tokens of a request that no group had cached: a recent mean
    requests  that share the step in which the prompt is computed

``behind`` is the marginal cost of work in a queue with random arrivals: work x behind work u costs
``u * x + x ** 2 / 2`` times the requests that come in a token's time, one in ``fresh``. The
quadratic term is weighted 1/16 rather than 1/2, because a copy also benefits later requests. A
missing token counts a quarter more than one, or waiting for a prefix that a group is computing
would cost as much as computing it again elsewhere.

A prefix gets a second home when one home has cost its requests too much. Each request adds to its
prefix's regret what one more home would have saved it, on average over the other groups; waiting
for the prefix itself does not count, since another group would compute it no sooner. When the sum
reaches four times the cost of a copy (``patience``), the next request makes it: the rule of renting
skis until the rent would have bought them. A prefix is named by a block in the second half of what
the other group lacks, so that requests of one name share at least half of that.

docs/decisions/0018-routing-policy.md says why each term is there and what else was tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol, TypeVar

import numpy as np

from quire.router.policies.decide import TIE_TOKENS, nearest, tied, tied_of_many
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, GroupState, Reason, RouteRequest
from quire.router.policies.replication import Regrets
from quire.router.policies.simple import Forgetful
from quire.worker.api.hashing import BlockHash

N = TypeVar("N", float, Column)
"""A number of one group, or one for each of many."""
N_co = TypeVar("N_co", float, Column, covariant=True)


class Load(Protocol[N_co]):
    """The load of one group, or of many: a `GroupState`, or `Loads`."""

    @property
    def num_running(self) -> N_co: ...
    @property
    def num_waiting(self) -> N_co: ...
    @property
    def num_pending_prefill_tokens(self) -> N_co: ...
    @property
    def num_reserved_requests(self) -> N_co: ...
    @property
    def num_reserved_tokens(self) -> N_co: ...
    @property
    def num_step_tokens(self) -> N_co: ...
    def step_over(self, now_s: float) -> N_co: ...


@dataclass(frozen=True, kw_only=True)
class PrefixAwareConfig:
    missing: float = 1.25
    """Weight of a missing token where nobody waits."""
    request_tokens: float = 24.0
    """Delay that a request causes to others, in tokens of prefill."""
    meanwhile: float = 0.0625
    """Weight of the requests that come while the missing tokens are computed."""
    max_behind: float = 12.0
    """Upper bound: behind a very long queue, later requests go elsewhere anyway."""
    first_fresh: float = 3072.0
    """Uncached tokens assumed per request at the start; counts as `fresh_prior` requests."""
    fresh_prior: int = 20
    fresh_memory: int = 200
    """Requests after which an observation counts for a third (1/e)."""
    min_fresh: float = 128.0
    max_fresh: float = 8192.0
    patience: float = 4.0
    """A copy is made when the summed regret reaches this many times its cost."""
    patience_memory: int = 1000
    """Requests per group after which a regret counts for a third (1/e)."""


class PrefixAware(Forgetful):
    """See the module's docstring. Each call of `costs` is taken for a request."""

    reason: Reason = "least_loaded"
    reads_steps = True

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config = config or PrefixAwareConfig()
        self._fresh = config.first_fresh
        self._num_seen = config.fresh_prior
        self._regrets = Regrets()
        self._memory_age = 0.0
        # Of the request that was asked for last, for `second_home`.
        self._work_each: list[tuple[float, float]] = []
        self._work_all: tuple[Column, Column] = np.empty(0), np.empty(0)

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        num_tokens, now_s = request.num_prompt_tokens, request.now_s
        self._work_each = [self._work(state, now_s) for state in groups]
        costs = self._costs(self._work_each, [num_tokens - hit for hit in hits])
        self.pressure = self._pressure(groups[costs.index(min(costs))])
        self._see(num_tokens - max(hits), len(groups))
        return costs

    def costs_of_many(self, request: RouteRequest, loads: Loads, hits: Column) -> Column:
        self._work_all = self._work(loads, request.now_s)
        costs = self._cost(*self._work_all, request.num_prompt_tokens - hits, np.minimum)
        self.pressure = self._pressure(loads.states[int(costs.argmin())])
        self._see(request.num_prompt_tokens - float(hits.max()), len(loads))
        return costs

    def second_home(
        self,
        request: RouteRequest,
        groups: Sequence[GroupState],
        hits: Sequence[int],
        home: int,
        num_coming: int,
    ) -> int:
        num_missing, work = request.num_prompt_tokens - hits[home], self._work_each
        costs = self._costs(work, [num_missing] * len(work))
        if costs[home] <= min(costs) + TIE_TOKENS:
            return home
        ties = tied(hits, costs)
        sooner = ties[0]
        if hits[sooner] >= hits[home]:
            return home
        most = costs[home] - num_coming
        # `sum` does not only add, since Python 3.12.
        saved = reduce(add, [most - cost for cost in costs if cost < most], 0.0)
        regret = saved / (len(costs) - 1)
        copied = self._cost(*work[sooner], request.num_prompt_tokens - hits[sooner], min)
        key = _name(request, hits[sooner], hits[home])
        is_paid = self._is_paid(key, regret, price=copied - costs[sooner])
        return nearest(request, groups, ties) if is_paid else home

    def second_home_of_many(
        self, request: RouteRequest, loads: Loads, hits: Column, home: int, num_coming: int
    ) -> int:
        num_missing = request.num_prompt_tokens - float(hits[home])
        queued, other = self._work_all
        costs = self._cost(queued, other, num_missing, np.minimum)
        cost = float(costs[home])
        if cost <= costs.min() + TIE_TOKENS:
            return home
        ties = tied_of_many(hits, costs)
        sooner = ties[0]
        hit, home_hit = int(hits[sooner]), int(hits[home])
        if hit >= home_hit:
            return home
        saved = np.maximum(cost - num_coming - costs, 0.0).cumsum()  # `np.sum` adds in pairs.
        regret = float(saved[-1]) / (len(costs) - 1)
        work = float(queued[sooner]), float(other[sooner])
        copied = self._cost(*work, request.num_prompt_tokens - hit, min)
        key = _name(request, hit, home_hit)
        is_paid = self._is_paid(key, regret, price=copied - float(costs[sooner]))
        return nearest(request, loads.states, ties) if is_paid else home

    def _work(self, load: Load[N], now_s: float) -> tuple[N, N]:
        """The queued work, and all other terms that do not depend on the request."""
        queued = load.num_pending_prefill_tokens + load.num_reserved_tokens
        num_in_step = load.num_running + load.num_waiting
        rest = self._config.request_tokens * num_in_step
        rest = rest - load.step_over(now_s) * (rest + load.num_step_tokens)
        beside = self._config.request_tokens * (num_in_step + load.num_reserved_requests)
        return queued, rest + beside

    def _cost(self, queued: N, other: N, missing: N | float, lesser: Callable[[N, float], N]) -> N:
        config = self._config
        behind = lesser((queued + config.meanwhile * missing) / self._fresh, config.max_behind)
        return queued + other + (config.missing + behind) * missing

    def _costs(self, work: Sequence[tuple[float, float]], missing: Sequence[float]) -> list[float]:
        """`_cost` of each group: written out, for calls would take most of the time."""
        config, fresh, most = self._config, self._fresh, self._config.max_behind
        weight, meanwhile = config.missing, config.meanwhile
        return [
            queued
            + other
            + (weight + (b if (b := (queued + meanwhile * num) / fresh) < most else most)) * num
            for (queued, other), num in zip(work, missing, strict=True)
        ]

    def _is_paid(self, key: BlockHash | None, regret: float, *, price: float) -> bool:
        if key is None:
            return False
        paid = self._regrets.add(key, regret, at=self._memory_age)
        if paid < self._config.patience * price:
            return False
        self._regrets.forget(key)
        return True

    def _pressure(self, state: GroupState) -> float:
        return min(state.num_queued_tokens / self._fresh, self._config.max_behind)

    def _see(self, num_fresh: float, num_groups: int) -> None:
        """Learns from a request that brings ``num_fresh`` tokens that no group has."""
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
