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

docs/decisions/0018-routing-policy.md says why each term is there and what else was tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, GroupState, Reason, RouteRequest
from quire.router.policies.simple import Forgetful

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


class PrefixAware(Forgetful):
    """See the module's docstring. Each call of `costs` is taken for a request."""

    reason: Reason = "least_loaded"
    reads_steps = True

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config = config or PrefixAwareConfig()
        self._fresh = config.first_fresh
        self._num_seen = config.fresh_prior

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        num_tokens, now_s = request.num_prompt_tokens, request.now_s
        work = [self._work(state, now_s) for state in groups]
        costs = self._costs(work, [num_tokens - hit for hit in hits])
        self.pressure = self._pressure(groups[costs.index(min(costs))])
        self._see(num_tokens - max(hits))
        return costs

    def costs_of_many(self, request: RouteRequest, loads: Loads, hits: Column) -> Column:
        work = self._work(loads, request.now_s)
        costs = self._cost(*work, request.num_prompt_tokens - hits, np.minimum)
        self.pressure = self._pressure(loads.states[int(costs.argmin())])
        self._see(request.num_prompt_tokens - float(hits.max()))
        return costs

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

    def _pressure(self, state: GroupState) -> float:
        return min(state.num_queued_tokens / self._fresh, self._config.max_behind)

    def _see(self, num_fresh: float) -> None:
        """Learns from a request that brings ``num_fresh`` tokens that no group has."""
        config = self._config
        self._num_seen = min(self._num_seen + 1, config.fresh_memory)
        mean = self._fresh + (num_fresh - self._fresh) / self._num_seen
        self._fresh = min(max(mean, config.min_fresh), config.max_fresh)
