"""Our policy: the least time to first token, for this request and for those that come after it.

    cost = queued + rest + (1.25 + pressure) * missing + 32 * requests

all in tokens, the time in which a group prefills one:

    queued    prompt tokens that the group must compute first, but for what is over of its
              present step
    rest      what else is left of that step: 32 for each request in it, but for what is over. A
              prompt waits for its end, for nearly all of it in one group and no time in another
    missing   the prompt's own tokens that it has not cached, and will not have when it gets there
              A quarter more than once, or waiting for a prefix that a group just computes would
              cost as much as computing it again elsewhere
    pressure  what a token computed costs others: the more is queued, the more requests wait
              behind it. With time to spare a prefix is copied to where the queue is short, without
              it stays: 4 * busy / (1 - busy), where a group with q queued tokens is busy by
              q / (q + 8,192), so that 4 q / 8,192 where all queues are alike
    requests  that share the step in which the prompt is computed

It needs no rates: every term scales with the speed of the hardware, and how long a step takes is
learned from the group's frames (`quire.router.step_clock`). ``busy`` is the average over
all groups and the last half second: short enough to see that caches are cold, or that many
prompts come at once, while a copy still costs most. What keeps a group busy is counted in tokens
and not in time, for most of a short step's time is not the prompts'.
docs/decisions/0014-simulator.md, 0018-policy.md and 0024-step-clock.md say what else was tried.
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
    pressure: float = 4.0
    """Weight of ``busy / (1 - busy)``."""
    max_pressure: float = 12.0
    """Near saturation that would have no end."""
    busy_tokens: float = 8192.0
    """A group with a queue of so many tokens is half busy. About what one step computes."""
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
        queues = [s.num_pending_prefill_tokens + s.num_reserved_tokens for s in groups]
        half = config.busy_tokens
        busy = sum([queued / (queued + half) for queued in queues]) / len(queues)
        busy = self._average(busy, request.now_s)
        self.pressure = min(config.max_pressure, config.pressure * busy / (1.0001 - busy))
        weight = config.missing + self.pressure
        num_tokens, now_s = request.num_prompt_tokens, request.now_s
        costs = []
        for state, queued, hit in zip(groups, queues, hits, strict=True):
            rest = config.request_tokens * (state.num_running + state.num_waiting)
            if state.step_s:
                share = (now_s - state.step_began_s) / state.step_s
                if 0 < share < _LATE:
                    rest -= min(share, 1.0) * (rest + state.num_step_tokens)
            beside = config.request_tokens * state.num_requests
            costs.append(queued + rest + weight * (num_tokens - hit) + beside)
        return costs

    def _average(self, sample: float, now_s: float) -> float:
        """How busy groups were over about the last ``window_s``, this sample included.

        A clock that goes back changes nothing.
        """
        elapsed_s = max(now_s - self._last_s, 0.0)
        self._last_s += elapsed_s
        self._busy += (1 - exp(-elapsed_s / self._config.window_s)) * (sample - self._busy)
        return self._busy
