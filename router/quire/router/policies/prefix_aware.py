"""Our policy: the least time to first token, for this request and for those that come after it.

    cost = queued + rest + (1.25 + behind) * missing + 32 * requests

all in tokens, the time in which a group prefills one, and all of one group:

    queued    prompt tokens that it must compute first, but for what is over of its present step
    rest      what else is left of that step: 32 for each request in it, but for what is over. A
              prompt waits for its end, for nearly all of it in one group and no time in another
    missing   the prompt's own tokens that it has not cached, and will not have when it gets there
              A quarter more than once, or waiting for a prefix that a group just computes would
              cost as much as computing it again elsewhere
    behind    what a token computed there costs others, later requests that start a token later:
              (pending + missing / 16) / fresh, 12 at most, where pending is what the group must
              compute first, all of the present step included
    fresh     prompt tokens that no group had cached, a request's on average of late
    requests  that share the step in which the prompt is computed

``behind`` is the marginal cost of work in a queue with random arrivals: with work u it is
u * missing + missing ** 2 / 2, for each new request waits for all work that is left, times how many
come in a token's time. A busy group computes one request in the time of the tokens that a request
brings, so that is one in ``fresh``; what is computed more than once is not counted, or copies would
bring copies. Of the square an eighth is counted: whoever shares the prefix will be glad of a second
home. So a long prefix stays where it is, even if other groups are idle, as it blocks one for all
that follow; a short one is copied to where nobody waits; and no queue elsewhere makes a copy on an
idle group any dearer, or requests would stay behind the queue that they form.

Not for ever, though: a prefix may be asked for more than one group can answer. A request that
another group would serve sooner, computing the prefix anew, and that does not go there because of
``behind``, pays for others. What requests for one prefix have paid so of late is added up, and when
it is twice what the copy costs others (``patience``), the next one makes it: the rule of who rents
skis until the rent would have bought them. A prefix has the name of a block in the half behind the
middle of what the other group lacks; whoever has it in common has at least half of that in common.

It needs no rates: every term scales with the speed of the hardware, and how long a step takes is
learned from the group's frames (`quire.router.step_clock`). docs/decisions/0014-simulator.md,
0018-policy.md, 0024-step-clock.md, 0025-work-behind.md, 0028-a-second-home.md, 0029-fresh-tokens.md
and 0030-patience.md say what else was tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from quire.router.loads import Loads
from quire.router.policies.regret import Regrets
from quire.router.policies.simple import Forgetful
from quire.router.policy import Column, GroupState, Reason, RouteRequest

N = TypeVar("N", float, Column)
"""A number of one group, or one for each of many."""
N_co = TypeVar("N_co", float, Column, covariant=True)


class Load(Protocol[N_co]):
    """What a group has to do, or each of many: a `GroupState`, or `Loads`."""

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
    request_tokens: float = 32.0
    """What a request slows others by, in tokens of prefill."""
    meanwhile: float = 0.0625
    """Weight of the requests that come while the missing tokens are computed."""
    max_behind: float = 12.0
    """Of a very long queue, later requests go elsewhere."""
    first_fresh: float = 3072.0
    """What a request is thought to bring before any was seen; counts for `fresh_prior` requests."""
    fresh_prior: int = 20
    fresh_memory: int = 200
    """Requests after which what one brought counts for a third (1/e)."""
    min_fresh: float = 128.0
    max_fresh: float = 8192.0
    patience: float = 2.0
    """Times what a copy costs others: as much may be paid in all by those who do without it."""
    patience_memory: int = 50
    """Requests for each group after which what was paid counts for a third (1/e)."""


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

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        num_tokens, now_s = request.num_prompt_tokens, request.now_s
        both = [
            self._costs(state, num_tokens - hit, now_s, min)
            for state, hit in zip(groups, hits, strict=True)
        ]
        costs, own = [cost for cost, _ in both], [cost - others for cost, others in both]
        home, sooner = costs.index(min(costs)), own.index(min(own))
        self.pressure = self._pressure(groups[home])
        if sooner != home and self._is_paid(request, hits, costs, own, home, sooner):
            costs[sooner] = own[sooner]
        self._see(num_tokens - max(hits), len(groups))
        return costs

    def costs_of_many(self, request: RouteRequest, loads: Loads, hits: Column) -> Column:
        missing = request.num_prompt_tokens - hits
        costs, others = self._costs(loads, missing, request.now_s, np.minimum)
        own = costs - others
        home, sooner = int(costs.argmin()), int(own.argmin())
        self.pressure = self._pressure(loads.states[home])
        if sooner != home and self._is_paid(request, hits, costs, own, home, sooner):
            costs[sooner] = own[sooner]
        self._see(request.num_prompt_tokens - float(hits.max()), len(loads))
        return costs

    def _costs(
        self, load: Load[N], missing: N, now_s: float, lesser: Callable[[N, float], N]
    ) -> tuple[N, N]:
        """All of it, and of that what those behind the request pay."""
        config = self._config
        queued = load.num_pending_prefill_tokens + load.num_reserved_tokens
        num_in_step = load.num_running + load.num_waiting
        rest = config.request_tokens * num_in_step
        rest = rest - load.step_over(now_s) * (rest + load.num_step_tokens)
        behind = lesser((queued + config.meanwhile * missing) / self._fresh, config.max_behind)
        beside = config.request_tokens * (num_in_step + load.num_reserved_requests)
        return queued + rest + (config.missing + behind) * missing + beside, behind * missing

    def _is_paid(
        self,
        request: RouteRequest,
        hits: Sequence[int] | Column,
        costs: Sequence[float] | Column,
        own: Sequence[float] | Column,
        home: int,
        sooner: int,
    ) -> bool:
        """Whether group ``sooner`` may copy at last what group ``home`` has, where those who come
        behind leave the request."""
        size, hashes = request.block_size, request.hashes
        begin, end = int(hits[sooner]) // size, min(int(hits[home]) // size, len(hashes))
        if end <= begin:
            return False
        middle = 1 << ((end - begin).bit_length() - 1)
        key = hashes[begin + middle - 1]
        paid = self._regrets.add(key, float(own[home] - own[sooner]), at=self._memory_age)
        price = (costs[sooner] - own[sooner]) - (costs[home] - own[home])
        if paid < self._config.patience * price:
            return False
        self._regrets.forget(key)
        return True

    def _pressure(self, state: GroupState) -> float:
        return min(state.num_queued_tokens / self._fresh, self._config.max_behind)

    def _see(self, num_fresh: float, num_groups: int) -> None:
        """A request brings so many tokens that no group has."""
        config = self._config
        self._num_seen = min(self._num_seen + 1, config.fresh_memory)
        self._memory_age += 1 / (config.patience_memory * num_groups)
        mean = self._fresh + (num_fresh - self._fresh) / self._num_seen
        self._fresh = min(max(mean, config.min_fresh), config.max_fresh)
