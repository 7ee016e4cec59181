"""Our policy: the least time to first token, for this request and for those that come after it.

    cost = queued + missing + again * (pressure / sqrt(uses) + regret) + RUNNING_TOKENS * requests

all in tokens, the time in which a group prefills one:

    queued    prompt tokens that the group must compute first
    missing   the prompt's own tokens that it has not cached, and will not have when it gets there
    again     those of them that some other group has: work that need not be
    pressure  what a token computed costs others: where prefill keeps groups busy a share ``busy``
              of the time, work puts off what comes later by ``busy / (1 - busy)`` times itself
    uses      of the longest cached prefix, now and then over the last minute: whoever comes next
              shares the cost of one copy more, so what is popular spreads over groups and what is
              not stays where it is. The root, for copies also take room from each other
    regret    the share of computed tokens that had been cached somewhere before and were evicted:
              so often what is evicted for the copy will be asked for again
    requests  that share the group's steps

It needs no rates: every term scales with the speed of the hardware. What it learns are averages
over the requests that it sees.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

from quire.router.policies.simple import RUNNING_TOKENS, Forgetful
from quire.router.policy import GroupState, Reason, RouteRequest
from quire.worker.hashing import BlockHash

_MAX_SEEN_BLOCKS = 1_000_000
_MAX_PREFIXES = 100_000
_MEMORY_TOKENS = 50_000_000
"""Regret is an average over about the last so many computed tokens."""


@dataclass(frozen=True, kw_only=True)
class PrefixAwareConfig:
    pressure: float = 8.0
    """Weight of the pressure, and its most: near saturation ``busy / (1 - busy)`` has no end."""
    max_pressure: float = 12.0
    regret: float = 4.0
    """Weight of the regret: an evicted block may be asked for more than once."""
    window_s: float = 10.0
    """Over which ``busy`` is averaged, beginning with a half."""
    uses_window_s: float = 60.0


class PrefixAware(Forgetful):
    """See the module's docstring."""

    reason: Reason = "least_loaded"

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config or PrefixAwareConfig()
        self._busy = Average(self._config.window_s, start=0.5)
        self._seen = SeenPrefixes()
        self._uses = PrefixUses(self._config.uses_window_s)

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        config = self._config
        queues = [s.num_pending_prefill_tokens + s.num_reserved_tokens for s in groups]
        busy = self._busy.add(1 - queues.count(0) / len(queues), request.now_s)
        pressure = min(config.max_pressure, config.pressure * busy / (1.0001 - busy))
        longest = max(hits)
        weight = 1 + config.regret * self._seen.note(request, longest)
        weight += pressure / sqrt(self._uses.note(request, longest))
        # What no group has, each would have to compute: it makes no difference between them.
        return [
            queued + weight * (longest - hit) + RUNNING_TOKENS * state.num_requests
            for state, queued, hit in zip(groups, queues, hits, strict=True)
        ]


class Average:
    """An average over about ``window_s`` seconds of what is seen now and then."""

    def __init__(self, window_s: float, *, start: float) -> None:
        self._window_s = window_s
        self._last_s = 0.0
        self._value = start

    def add(self, sample: float, now_s: float) -> float:
        """The average after ``sample``; a clock that goes back does not count."""
        weight = 1 - exp(min(self._last_s - now_s, 0.0) / self._window_s)
        self._last_s = max(now_s, self._last_s)
        self._value += weight * (sample - self._value)
        return self._value


class PrefixUses:
    """How many requests of late had the same longest cached prefix."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._uses: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()

    def note(self, request: RouteRequest, longest_hit: int) -> float:
        """The uses over about the last ``window_s`` seconds, this one included."""
        num_held = longest_hit // request.block_size
        if not 0 < num_held <= len(request.hashes):
            return 1.0
        end = request.hashes[num_held - 1]
        uses, last_s = self._uses.pop(end, (0.0, request.now_s))
        uses = uses * exp(min(last_s - request.now_s, 0.0) / self._window_s) + 1
        self._uses[end] = uses, request.now_s
        if len(self._uses) > _MAX_PREFIXES:
            self._uses.popitem(last=False)
        return uses


class SeenPrefixes:
    """How often tokens are asked for again after the last group that held them let them go."""

    def __init__(self) -> None:
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_lost = 0.0
        self._num_computed = 1.0

    def note(self, request: RouteRequest, longest_hit: int) -> float:
        """The lost tokens asked for again, as a share of those computed, after this request."""
        hashes, seen = request.hashes, self._seen
        num_held = longest_hit // request.block_size
        num_seen = num_held
        while num_seen < len(hashes) and hashes[num_seen] in seen:
            num_seen += 1
        for block in hashes[num_seen:]:
            seen[block] = None
        while len(seen) > _MAX_SEEN_BLOCKS:
            seen.popitem(last=False)
        self._num_lost += (num_seen - num_held) * request.block_size
        self._num_computed += request.num_prompt_tokens - longest_hit
        if self._num_computed > _MEMORY_TOKENS:
            self._num_lost /= 2
            self._num_computed /= 2
        return self._num_lost / self._num_computed
