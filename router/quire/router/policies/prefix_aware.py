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
              pending / 3072 + missing / 16384, 12 at most, where pending is what the group must
              compute first, all of the present step included
    requests  that share the step in which the prompt is computed

``behind`` is the marginal cost of work in a queue with random arrivals, divided by how many come
in a token's time: with work u it is u * missing + missing ** 2 / 2, for each new request waits for
all work that is left. Of the square three eighths are counted: whoever shares the prefix will be
glad of a second home. So a long prefix stays where it is, even if other groups are idle, as it
blocks one for all that follow; a short one is copied to where nobody waits; and no queue elsewhere
makes a copy on an idle group any dearer, or requests would stay behind the queue that they form.

It needs no rates and remembers nothing: every term scales with the speed of the hardware, and how
long a step takes is learned from the group's frames (`quire.router.step_clock`).
docs/decisions/0014-simulator.md, 0018-policy.md, 0024-step-clock.md and 0025-work-behind.md say
what else was tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.router.policies.simple import Forgetful
from quire.router.policy import GroupState, Reason, RouteRequest

_LATE = 2.0
"""A step that takes so many times as long as expected was guessed wrong, or its frame went to
other gateways only, or the group hangs: nothing is known of it."""


@dataclass(frozen=True, kw_only=True)
class PrefixAwareConfig:
    missing: float = 1.25
    """Weight of a missing token where nobody waits."""
    request_tokens: float = 32.0
    """What a request slows others by, in tokens of prefill."""
    tokens_per_arrival: float = 3072.0
    """A group that has so many tokens to compute has, until it is through, one request more that
    waits behind a token computed now."""
    tokens_per_arrival_meanwhile: float = 16384.0
    """So many missing tokens have one such request more, that comes while they are computed."""
    max_behind: float = 12.0
    """Of a very long queue, later requests go elsewhere."""


class PrefixAware(Forgetful):
    """See the module's docstring."""

    reason: Reason = "least_loaded"
    reads_steps = True

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config or PrefixAwareConfig()

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        config = self._config
        num_tokens, now_s = request.num_prompt_tokens, request.now_s
        per_queued, most = 1 / config.tokens_per_arrival, config.max_behind
        per_missing = 1 / config.tokens_per_arrival_meanwhile
        costs = []
        pressures = []
        for state, hit in zip(groups, hits, strict=True):
            missing = num_tokens - hit
            queued = state.num_pending_prefill_tokens + state.num_reserved_tokens
            pressure = queued * per_queued
            behind = min(pressure + missing * per_missing, most)
            rest = config.request_tokens * (state.num_running + state.num_waiting)
            if state.step_s:
                share = (now_s - state.step_began_s) / state.step_s
                if 0 < share < _LATE:
                    rest -= min(share, 1.0) * (rest + state.num_step_tokens)
            beside = config.request_tokens * state.num_requests
            pressures.append(pressure)
            costs.append(queued + rest + (config.missing + behind) * missing + beside)
        self.pressure = min(pressures[costs.index(min(costs))], most)
        return costs
