"""Our policy: the least time to first token, for this request and for those that come after it.

    cost = queued + (2 + pressure) * missing + RUNNING_TOKENS * requests

all in tokens, the time in which a group prefills one:

    queued    prompt tokens that the group must compute first
    missing   the prompt's own tokens that it has not cached, and will not have when it gets there
              Twice, or waiting for a prefix that a group just computes would cost as much as
              computing it again elsewhere
    pressure  what a token computed costs others: where prefill keeps groups busy a share ``busy``
              of the time, work puts off what comes later by ``busy / (1 - busy)`` times itself.
              With time to spare a prefix is copied to where the queue is short, without it stays
    requests  that share the group's steps

It needs no rates: every term scales with the speed of the hardware. ``busy`` is learned from what
each request finds. docs/decisions/0014-simulator.md says what else was tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from quire.router.policies.simple import RUNNING_TOKENS, Forgetful
from quire.router.policy import GroupState, Reason, RouteRequest


@dataclass(frozen=True, kw_only=True)
class PrefixAwareConfig:
    pressure: float = 4.0
    """Weight of ``busy / (1 - busy)``."""
    max_pressure: float = 12.0
    """Near saturation that would have no end."""
    window_s: float = 10.0
    """Over which ``busy`` is averaged."""


class PrefixAware(Forgetful):
    """See the module's docstring."""

    reason: Reason = "least_loaded"

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config or PrefixAwareConfig()
        self._busy = 0.0
        self._last_s = 0.0

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        config = self._config
        queues = [s.num_pending_prefill_tokens + s.num_reserved_tokens for s in groups]
        busy = self._average(1 - queues.count(0) / len(queues), request.now_s)
        self.pressure = min(config.max_pressure, config.pressure * busy / (1.0001 - busy))
        weight = 2 + self.pressure
        num_tokens = request.num_prompt_tokens
        return [
            queued + weight * (num_tokens - hit) + RUNNING_TOKENS * state.num_requests
            for state, queued, hit in zip(groups, queues, hits, strict=True)
        ]

    def _average(self, sample: float, now_s: float) -> float:
        """The share of busy groups over about the last ``window_s``, this sample included.

        A clock that goes back changes nothing.
        """
        elapsed_s = max(now_s - self._last_s, 0.0)
        self._last_s += elapsed_s
        self._busy += (1 - exp(-elapsed_s / self._config.window_s)) * (sample - self._busy)
        return self._busy
