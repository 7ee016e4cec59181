"""How many requests the replica groups can begin within a time, by their loads and speeds.

A request waits for three things, and begins when it has the last of them:

    prefill  prompt tokens ahead of it           over  prompt tokens computed per second
    a slot   sequences that must end before it   over  sequences that end per second
    blocks   KV that must be let go before it    over  blocks let go per second

Sequences that end per second are output tokens per second over the mean output length. That mean
includes outputs under way as *censored* observations (they are at least that long); otherwise short
outputs, which end first, would be taken for all.

A gateway sees the requests of the other gateways only in the groups' frames. Until then it assumes
that each of them sent as many as itself. So several gateways together fill the visible room once,
not once each; a gateway that alone has requests fills it too, over as many frames as there are
gateways.
"""

from collections.abc import Callable

import numpy as np

from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column

_KEPT = 1 - 1 / 100
"""A hundred outputs ago, one counted for a third (1/e) of a new one."""
_PRIOR_OUTPUT_TOKENS = 128.0


class Capacity:
    """One gateway's estimate. It learns how long outputs are."""

    def __init__(
        self, *, block_size: int, num_to_compute: Callable[[float], float] = float
    ) -> None:
        """``num_to_compute``: of so many prompt tokens, those that no group has cached."""
        self._block_size = block_size
        self._num_to_compute = num_to_compute
        self._num_tokens = _PRIOR_OUTPUT_TOKENS
        self._num_ends = 1.0
        self._num_allowed = self._num_asked = 0.0

    def asked(self, max_tokens: int) -> None:
        """A completion begins that may be ``max_tokens`` long."""
        self._num_allowed = self._num_allowed * _KEPT + max_tokens
        self._num_asked = self._num_asked * _KEPT + 1

    def generated(self, num_tokens: int) -> None:
        """Counts further tokens of this gateway's completions."""
        self._num_tokens += num_tokens

    def ended(self, num_completions: int) -> None:
        """Counts completions that have ended."""
        for _ in range(num_completions):
            self._num_tokens *= _KEPT
            self._num_ends = self._num_ends * _KEPT + 1

    @property
    def mean_output(self) -> float:
        """Tokens seen over ends seen, which is the most likely mean of an exponential distribution
        from a sample that is partly under way; at most what was asked for."""
        mean = max(self._num_tokens / self._num_ends, 1.0)
        return min(mean, self._num_allowed / self._num_asked) if self._num_asked else mean

    def room(self, loads: Loads, *, wait_s: float, tokens_each: float) -> float:
        """How many requests beyond those sent could begin within ``wait_s``.

        Each has a prompt of ``tokens_each``.
        """
        if not loads:
            return 0.0
        num_gateways, tokens_each = loads.most_gateways, self._tokens_each(tokens_each)
        prefill_per_s, *output_per_s = loads.speeds
        # Sequences that end until then.
        num_full, num_short = (each / self.mean_output * wait_s for each in output_per_s)
        tokens_ahead = loads.num_pending_prefill_tokens + loads.num_reserved_tokens * num_gateways
        # The last request begins when the tokens ahead of it have been computed, without its own.
        spare_tokens = prefill_per_s * wait_s - tokens_ahead
        room: Column = (spare_tokens / tokens_each + 1) * (spare_tokens >= 0)
        ahead = loads.num_waiting + loads.num_reserved_requests * num_gateways
        slots = loads.max_num_seqs - loads.num_running - ahead + num_full
        # A group that says no number of slots is full if some wait.
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
        # Sums up from the first to the last, which `numpy.sum` does not.
        return float(np.add.accumulate(room)[-1])

    def begun_per_s(self, loads: Loads, *, tokens_each: float) -> float:
        """How many requests the groups begin per second when they have enough of them."""
        prefill_per_s, full_per_s, _ = loads.speeds
        per_s = prefill_per_s / self._tokens_each(tokens_each)
        has_slots = np.isfinite(loads.max_num_seqs)
        np.minimum(per_s, full_per_s / self.mean_output, out=per_s, where=has_slots)
        total: float = sum(per_s.tolist())
        return total

    def _tokens_each(self, num_tokens: float) -> float:
        return max(self._num_to_compute(num_tokens), 1.0)
