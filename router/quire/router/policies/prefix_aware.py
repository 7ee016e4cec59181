"""Our policy: the least time to first token, for this request and for those that come after it.

    cost = wait + (1 + pressure) * prefill(missing) + regret * missing        in tokens

    wait      what the group computes before this request: its queued tokens, and for each chunk
              of them and of this prompt the decodes that run in the same step
    pressure  what computing here costs others, per token: in a queue that is busy a share ``busy``
              of the time, work delays what arrives later by ``busy / (1 - busy)`` times itself,
              once in this group and, as prefixes are computed again elsewhere, once more
    regret    what the blocks that are evicted for the missing tokens will cost when they are asked
              for again

It needs no rates: all terms scale with the speed of the hardware. ``busy`` and ``regret`` are
averages that it learns from the requests it sees.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from quire.router.directory import GroupId
from quire.router.policies.simple import Forgetful
from quire.router.policy import GroupState, Reason, RouteRequest
from quire.worker.hashing import BlockHash


@dataclass(frozen=True, kw_only=True)
class PrefixAwareConfig:
    """What the policy assumes of the engine, and how much it looks ahead."""

    step_tokens: float = 0.0
    """The fixed cost of a step, in tokens of prefill."""
    quadratic: float = 0.0
    """Attention: prefilling n tokens costs ``n + quadratic * n**2``."""
    decode_tokens: float = 1024.0
    """What decoding adds to a step when sequences hold the whole cache."""
    chunk_tokens: int = 8192
    max_pressure: float = 12.0
    pressure: float = 2.0
    regret: float = 4.0
    window_s: float = 10.0


class PrefixAware(Forgetful):
    """See the module's docstring."""

    reason: Reason = "least_loaded"

    def __init__(self, config: PrefixAwareConfig | None = None) -> None:
        self._config = config or PrefixAwareConfig()
        self._busy = Average(self._config.window_s)
        self._ghosts = SeenPrefixes()
        self._hits: dict[GroupId, int] = {}

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        config = self._config
        queues = [s.num_pending_prefill_tokens + s.num_reserved_tokens for s in groups]
        busy = self._busy.add((len(queues) - queues.count(0)) / len(queues), request.now_s)
        pressure = min(config.max_pressure, config.pressure * busy / (1.0001 - busy))
        own = 1 + pressure
        linear = own + config.regret * self._ghosts.note(request, max(hits))
        quadratic = own * config.quadratic
        num_tokens = request.num_prompt_tokens
        costs = []
        for state, queued, hit in zip(groups, queues, hits, strict=True):
            missing = num_tokens - hit
            cost = queued + missing * (linear + quadratic * missing)
            if config.decode_tokens:
                cost += (
                    state.fill
                    * config.decode_tokens
                    * (1 + (queued + missing) / config.chunk_tokens)
                )
            costs.append(cost)
        return costs


class Average:
    """An average over about ``window_s`` seconds of what is seen now and then."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last_s = 0.0
        self.value = 0.0

    def add(self, sample: float, now_s: float) -> float:
        weight = 1 - exp(min(self._last_s - now_s, 0.0) / self._window_s)
        self._last_s = max(now_s, self._last_s)
        self.value += weight * (sample - self.value)
        return self.value


class SeenPrefixes:
    """How often tokens are asked for again after the last group that held them let them go."""

    def __init__(self, *, max_blocks: int = 1_000_000) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        self._num_lost = 0.0
        self._num_computed = 1.0

    def note(self, request: RouteRequest, longest_hit: int) -> float:
        """The lost tokens asked for again, as a share of those computed, after this request."""
        hashes, seen = request.hashes, self._seen
        known = longest_hit // request.block_size
        first_new = known
        while first_new < len(hashes) and hashes[first_new] in seen:
            first_new += 1
        for block in hashes[first_new:]:
            seen[block] = None
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)
        missing = request.num_prompt_tokens - longest_hit
        self._num_lost += (first_new - known) * request.block_size
        self._num_computed += missing
        if self._num_computed > 50_000_000:
            self._num_lost /= 2
            self._num_computed /= 2
        return self._num_lost / self._num_computed
