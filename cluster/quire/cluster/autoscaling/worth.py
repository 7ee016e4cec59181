"""What the cluster would lose with a replica group, in tokens to be computed again elsewhere.

Two sums: the prompt tokens that the group's cache saved lately, and the tokens that its running
requests hold. Both are tokens, so that they add up without a weight.

What other groups hold too is not subtracted, since only gateways know that. A prefix that all
groups hold is asked for in all of them: it counts for all alike, and decides nothing.
"""

from math import exp

LATELY_S = 120.0
"""A hit counts in full at first, and for 1/e after so long."""


class GroupWorth:
    """Kept by the group itself, so that it outlives a restart of Serve's controller."""

    def __init__(self) -> None:
        self._num_saved_tokens = 0.0
        self._num_hit_tokens = 0
        self._time_s = 0.0

    def observe(self, *, num_hit_tokens: int, num_held_tokens: int, now_s: float) -> float:
        """The group's worth in tokens, at a time that does not go back.

        ``num_hit_tokens`` counts prompt tokens that were in the cache, since the group began;
        ``num_held_tokens`` are those of running requests, now.
        """
        self._num_saved_tokens *= exp((self._time_s - now_s) / LATELY_S)
        self._num_saved_tokens += num_hit_tokens - self._num_hit_tokens
        self._num_hit_tokens, self._time_s = num_hit_tokens, now_s
        return self._num_saved_tokens + num_held_tokens
