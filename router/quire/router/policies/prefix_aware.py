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

from dataclasses import dataclass

import numpy as np

from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, GroupState, Reason, RouteRequest
from quire.router.policies.simple import Forgetful


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

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config = config or PrefixAwareConfig()
        self._fresh = config.first_fresh
        self._num_seen = config.fresh_prior

    def costs(self, request: RouteRequest, groups: Loads, hits: Column) -> Column:
        config, queued = self._config, groups.num_queued_tokens
        num_in_step = groups.num_running + groups.num_waiting
        rest = config.request_tokens * num_in_step
        rest = rest - groups.step_over(request.now_s) * (rest + groups.num_step_tokens)
        beside = config.request_tokens * (num_in_step + groups.num_reserved_requests)
        missing = request.num_prompt_tokens - hits
        behind = (queued + config.meanwhile * missing) / self._fresh
        np.minimum(behind, config.max_behind, out=behind)
        costs: Column = queued + (rest + beside) + (config.missing + behind) * missing
        self.pressure = self._pressure(groups.states[int(costs.argmin())])
        self._see(float(missing.min()))
        return costs

    def _pressure(self, state: GroupState) -> float:
        return min(state.num_queued_tokens / self._fresh, self._config.max_behind)

    def _see(self, num_fresh: float) -> None:
        """Learns from a request that brings ``num_fresh`` tokens that no group has."""
        config = self._config
        self._num_seen = min(self._num_seen + 1, config.fresh_memory)
        mean = self._fresh + (num_fresh - self._fresh) / self._num_seen
        self._fresh = min(max(mean, config.min_fresh), config.max_fresh)
