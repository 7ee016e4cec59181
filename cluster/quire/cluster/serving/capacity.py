"""Estimates how many requests the replica groups can begin within a time, from loads and speeds.

A request waits for three resources, and begins when it has the last of them:

    prefill  prompt tokens ahead of it           over  prompt tokens computed per second
    a slot   sequences that must end before it   over  sequences that end per second
    blocks   blocks that must be freed before it over  blocks freed per second

Sequences that end per second are output tokens per second over the mean output length. That mean
includes unfinished outputs as *censored* observations (they are at least that long); otherwise it
would only represent short outputs, which end first.

A gateway sees the requests of the other gateways only in the groups' frames. Until then it assumes
that each of them sent as many as itself. So several gateways together fill the visible room once,
not once each. A gateway that alone has requests also fills it, over as many frames as there are
gateways.
"""

from collections.abc import Callable

import numpy as np

from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column

_KEPT = 1 - 1 / 100
"""Decay per ended output: after a hundred more, an output counts a third (1/e) of a new one."""
_PRIOR_OUTPUT_TOKENS = 128.0


class Capacity:
    """One gateway's estimate of the groups' capacity. It learns the mean output length."""

    def __init__(
        self, *, block_size: int, num_to_compute: Callable[[float], float] = float
    ) -> None:
        """``num_to_compute`` returns how many of a number of prompt tokens are not cached."""
        self._block_size = block_size
        self._num_to_compute = num_to_compute
        self._num_tokens = _PRIOR_OUTPUT_TOKENS
        self._num_ends = 1.0
        self._num_allowed = self._num_asked = 0.0

    def asked(self, max_tokens: int) -> None:
        """Counts a new completion whose output may be ``max_tokens`` long."""
        self._num_allowed = self._num_allowed * _KEPT + max_tokens
        self._num_asked = self._num_asked * _KEPT + 1

    def generated(self, num_tokens: int) -> None:
        """Counts ``num_tokens`` more output tokens of this gateway's completions."""
        self._num_tokens += num_tokens

    def ended(self, num_completions: int) -> None:
        """Counts completions that have ended."""
        for _ in range(num_completions):
            self._num_tokens *= _KEPT
            self._num_ends = self._num_ends * _KEPT + 1

    @property
    def mean_output(self) -> float:
        """Mean output length in tokens: tokens seen over ends seen, which is the maximum-likelihood
        estimate for a censored exponential sample; at most the mean ``max_tokens``."""
        mean = max(self._num_tokens / self._num_ends, 1.0)
        return min(mean, self._num_allowed / self._num_asked) if self._num_asked else mean

    def room(self, loads: Loads, *, wait_s: float, tokens_each: float) -> float:
        """How many requests, beyond those sent, could begin within ``wait_s``.

        Each has a prompt of ``tokens_each`` tokens.
        """
        if not loads:
            return 0.0
        num_gateways, tokens_each = loads.most_gateways, self._tokens_each(tokens_each)
        prefill_per_s, *output_per_s = loads.speeds
        # Sequences that end within `wait_s`.
        num_full, num_short = (each / self.mean_output * wait_s for each in output_per_s)
        tokens_ahead = loads.num_pending_prefill_tokens + loads.num_reserved_tokens * num_gateways
        # A request begins when the tokens ahead of it are computed, hence the + 1.
        spare_tokens = prefill_per_s * wait_s - tokens_ahead
        room: Column = (spare_tokens / tokens_each + 1) * (spare_tokens >= 0)
        ahead = loads.num_waiting + loads.num_reserved_requests * num_gateways
        slots = loads.max_num_seqs - loads.num_running - ahead + num_full
        # A group without a limit of slots counts as full if requests wait there.
        slots[np.isinf(loads.max_num_seqs) & (loads.num_waiting > 0)] = -np.inf
        np.minimum(room, slots, out=room)
        running, available = loads.num_running, loads.num_available_blocks
        held = np.maximum(loads.num_blocks - available, 0)
        num_let_go = num_short * held / np.maximum(running, 1)
        num_wanted = loads.num_queued_tokens / self._block_size + running
        spare = available + num_let_go - num_wanted
        in_blocks = spare / (tokens_each / self._block_size + 1)
        np.minimum(room, in_blocks, out=room, where=running > 0)
        # An idle group can begin one request, whatever its speed.
        np.maximum(room, loads.num_requests == 0, out=room)
        # Adds from first to last; `numpy.sum` may add in another order.
        return float(np.add.accumulate(room)[-1])

    def begun_per_s(self, loads: Loads, *, tokens_each: float) -> float:
        """Requests that the groups begin per second while enough of them wait."""
        prefill_per_s, full_per_s, _ = loads.speeds
        per_s = prefill_per_s / self._tokens_each(tokens_each)
        has_slots = np.isfinite(loads.max_num_seqs)
        np.minimum(per_s, full_per_s / self.mean_output, out=per_s, where=has_slots)
        total: float = sum(per_s.tolist())
        return total

    def _tokens_each(self, num_tokens: float) -> float:
        return max(self._num_to_compute(num_tokens), 1.0)
