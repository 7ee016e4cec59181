"""Our policy: the least time to first token, for this request and for those that come after it.

    cost = queued + rest + (1.25 + behind) * missing + 32 * requests

all in tokens, the time in which a group prefills one, and all of one group:

    queued    prompt tokens that it must compute first, but for what is over of its present step
    rest      what else is left of that step: 32 for each request in it, but for what is over. A
              prompt waits for its end, for nearly all of it in one group and no time in another
    missing   the prompt's own tokens that it has not cached, and will not have when it gets there
              A quarter more than once, or waiting for a prefix that a group just computes would
              cost as much as computing it again elsewhere
    behind    what a token computed there costs others: all requests that come before the group is
              through with what it has, and half of those that come while it computes this
              prompt, start a token later. So pressure + missing / 8192, 12 at most
    pressure  pending / 2048, where pending is all that it must compute first, the present step
              included; but no more than 4 * busy / (1 - busy), where ``busy`` is the mean of
              pending / (pending + 8192) over all groups and the last half second: those who
              would wait longer than that in one group can go to another
    requests  that share the step in which the prompt is computed

``behind`` follows the marginal cost of work in a queue with random arrivals: put behind work u it
is u * missing + missing ** 2 / 2, for each new request waits for all work that is left. So a long
prefix stays where it is, even if other groups are idle, as it blocks one for all that follow; a
short one is copied to where nobody waits; and no queue elsewhere makes a copy on an idle group any
dearer, or requests would stay behind the queue that they form.

It needs no rates: every term scales with the speed of the hardware, and how long a step takes is
learned from the group's frames (`quire.router.step_clock`).
docs/decisions/0014-simulator.md, 0018-policy.md, 0024-step-clock.md and 0025-work-behind.md say
what else was tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

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
    busy_tokens: float = 8192.0
    """A group with a queue of so many tokens is half busy. About what one step computes."""
    pressure: float = 4.0
    """Of a queue of ``busy_tokens``."""
    blocked: float = 1.0
    """Of a prompt that lacks ``busy_tokens``, beside the queue: it blocks the group so long."""
    max_behind: float = 12.0
    """Near saturation that would have no end."""
    window_s: float = 0.5
    """Over which ``busy`` is averaged."""


class PrefixAware(Forgetful):
    """See the module's docstring."""

    reason: Reason = "least_loaded"
    reads_steps = True

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config or PrefixAwareConfig()
        self._busy = 0.0
        self._last_s = 0.0

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        config = self._config
        num_tokens, now_s = request.num_prompt_tokens, request.now_s
        queues = [s.num_pending_prefill_tokens + s.num_reserved_tokens for s in groups]
        half = config.busy_tokens
        busy = sum([queued / (queued + half) for queued in queues]) / len(queues)
        busy = self._average(busy, now_s)
        mean = config.pressure * busy / (1.0001 - busy)
        per_queued, per_missing = config.pressure / half, config.blocked / half
        costs = []
        pressures = []
        for state, queued, hit in zip(groups, queues, hits, strict=True):
            missing = num_tokens - hit
            pressure = min(queued * per_queued, mean)
            behind = min(pressure + missing * per_missing, config.max_behind)
            rest = config.request_tokens * (state.num_running + state.num_waiting)
            if state.step_s:
                share = (now_s - state.step_began_s) / state.step_s
                if 0 < share < _LATE:
                    rest -= min(share, 1.0) * (rest + state.num_step_tokens)
            beside = config.request_tokens * state.num_requests
            pressures.append(pressure)
            costs.append(queued + rest + (config.missing + behind) * missing + beside)
        self.pressure = min(pressures[costs.index(min(costs))], config.max_behind)
        return costs

    def _average(self, sample: float, now_s: float) -> float:
        """How busy groups were over about the last ``window_s``, this sample included.

        A clock that goes back changes nothing.
        """
        elapsed_s = max(now_s - self._last_s, 0.0)
        self._last_s += elapsed_s
        self._busy += (1 - exp(-elapsed_s / self._config.window_s)) * (sample - self._busy)
        return self._busy
