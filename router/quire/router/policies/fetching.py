"""Predicts which blocks of a prompt a group would fetch instead of compute, and at what cost.

A group takes the leading blocks of a prompt from its KV cache, the next ones from its slower tiers
(host memory, disk), the next from another group, the *source*, and computes the rest. The cost of
fetching is counted in tokens, the time in which a group prefills one. A group's *effective hits*
are the tokens that it need not compute, less the cost of fetching them. A kind of fetching counts
only if it saves time.

    seconds = fixed + per_token * tokens

is learned for each kind from the groups' counters. Until then a default estimate is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import NamedTuple

import numpy as np

from quire.router.accuracy import moved_mean
from quire.router.policies.policy import Column, GroupLoad
from quire.router.policies.speeds import PRIOR_PREFILL_PER_S, Line
from quire.router.prefix_index.directory import GroupId

# T slower tiers   G groups   K kinds of fetching

KINDS = ("host", "disk", "peer")
MIN_SAVED_TOKENS = 32.0
"""Fetching from a source must be forecast to save at least this much computing."""
PATIENCE = 0.1
"""How long an engine that could compute waits for the first fetched block, as a share of the time
that computing would take."""
_PEER = KINDS.index("peer")
_ROWS = {
    (0, True): slice(_PEER, None),
    (1, False): slice(0, 1),
    (1, True): slice(0, None, _PEER),
    (2, False): slice(0, 2),
    (2, True): slice(0, None),
}
"""Indices into `KINDS`, by the number of slower tiers and whether there is a source."""
_LEAST_SAVED = {
    False: np.array([[1e-9], [1e-9]]),
    True: np.array([[1e-9], [1e-9], [MIN_SAVED_TOKENS]]),
}
"""Tokens that each row must save, keyed by whether the last row is a source's."""
_GUESSED_SHARES = (0.04, 0.08, 0.12)
"""Default cost per token, by kind, as a share of the time that computing takes."""
_GUESSED_FIXED_S = (0.0005, 0.002, 0.004)
_WAITS_KEPT = 50
_FAILURES_KEPT_S = 60.0
"""Seconds after which a failed fetch from another group counts for a third (1/e)."""


class FetchCosts:
    """One group's costs of fetching, learned from its counters."""

    def __init__(self) -> None:
        self._lines = [Line(window=_WAITS_KEPT) for _ in KINDS]
        # Tokens and seconds not learned from yet: either counter may rise a frame before the other.
        self._unlearned = [(0, 0.0) for _ in KINDS]
        self._last: GroupLoad | None = None
        self._source_rest_s: float | None = None
        self._num_failures = 0.0
        self._failures_at_s = 0.0

    def observe(self, load: GroupLoad, *, at_s: float) -> bool:
        """Learns from the load of a frame; returns whether the costs may have changed."""
        last, self._last = self._last, load
        if last is None or sum(load.fetched) < sum(last.fetched):
            return False
        num_failures = max(load.num_failed_pulls - last.num_failed_pulls, 0)
        if num_failures or self._num_failures > 0.01:
            kept = exp(min(self._failures_at_s - at_s, 0.0) / _FAILURES_KEPT_S)
            self._num_failures = self._num_failures * kept + num_failures
            self._failures_at_s = at_s
        elif load.fetched == last.fetched:
            return False
        # Copies from host memory are part of steps, and not timed.
        counted = {
            "disk": (load.num_disk_tokens - last.num_disk_tokens, load.disk_s - last.disk_s),
            "peer": (load.num_peer_tokens - last.num_peer_tokens, load.peer_s - last.peer_s),
        }
        for name, (num_tokens, wait_s) in counted.items():
            kind = KINDS.index(name)
            num_before, before_s = self._unlearned[kind]
            num_tokens, wait_s = num_before + num_tokens, before_s + wait_s
            if num_tokens > 0 and wait_s > 0:
                self._lines[kind].add(num_tokens, wait_s)
                num_tokens, wait_s = 0, 0.0
            self._unlearned[kind] = num_tokens, wait_s
        return True

    def asked(self, *, source_rest_s: float) -> None:
        """Records that the group will fetch from a source with this much of its step left."""
        self._source_rest_s = moved_mean(self._source_rest_s, source_rest_s)

    def tokens(self, prefill_per_s: float) -> Column:
        """Costs by kind, of shape (2, K), in tokens: fixed, and per token fetched, for a group that
        computes ``prefill_per_s``. The rest of a source's step is left out, because each decision
        knows it better."""
        costs_2K = np.empty((2, len(KINDS)))
        for kind, line in enumerate(self._lines):
            parts = line.parts
            if parts is None:
                fixed, share = _GUESSED_FIXED_S[kind] * prefill_per_s, _GUESSED_SHARES[kind]
            else:
                rest_s = (self._source_rest_s or 0.0) if kind == _PEER else 0.0
                fixed_s, token_s = max(parts[0] - rest_s, 0.0), parts[1]
                fixed, share = fixed_s * prefill_per_s, token_s * prefill_per_s
            costs_2K[:, kind] = fixed, share
        costs_2K[:, _PEER] *= 1 + self._num_failures
        return costs_2K


GUESSED_2K = FetchCosts().tokens(PRIOR_PREFILL_PER_S)
"""Costs that are assumed for a group without observations."""


class Fetches(NamedTuple):
    """The tokens of a prompt that each group would fetch. R: rows, one per place fetched from."""

    hits: Column
    """Effective hits in tokens: cached tokens, plus fetched tokens less their cost."""
    num_RG: Column
    """Tokens fetched."""
    costs_RG: Column
    """Cost of fetching, in tokens."""
    is_lent: bool
    """Whether the last row is the source's."""

    @property
    def num_tokens(self) -> Column:
        """Tokens that each group would fetch, over all places."""
        num: Column = self.num_RG.sum(axis=0)
        return num

    def num_lent(self, index: int) -> int:
        """Tokens that the group at ``index`` would fetch from the source."""
        return int(self.num_RG[-1, index]) if self.is_lent else 0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where blocks of a prompt are held, other than in the groups' KV caches."""

    slower_TG: Column
    """Leading blocks that each group has in each slower tier or a faster one."""
    source: GroupId | None
    """The group that can send the most leading blocks; ``None`` if none can."""
    num_lent: int
    """How many leading blocks the source has."""
    takes_G: Column
    """1 for each group that can fetch from others, else 0."""
    source_rest: float = 0.0
    """The rest of the source's current step, in tokens: it can send only from the next step on."""

    def only(self, positions: Sequence[int]) -> "Elsewhere":
        """The same for the groups at these positions only."""
        return replace(
            self, slower_TG=self.slower_TG[:, positions], takes_G=self.takes_G[positions]
        )

    def fetches(
        self,
        costs_2KG: Column,
        cached: Column,
        step_rest: Column,
        next_step: Column,
        *,
        usable_blocks: int,
        block_size: int,
    ) -> Fetches | None:
        """The tokens that each group would fetch; None if there are none. ``cached``: tokens in
        each group's KV cache. ``step_rest``: the rest of its current step, which fetching overlaps.
        ``next_step``: the length of the step after that without the request. All in tokens."""
        is_lent, num_slower = self.source is not None, len(self.slower_TG)
        if not num_slower + is_lent:
            return None
        # As few array operations as possible: the overhead of each call exceeds its work.
        ends_RG = np.empty((1 + num_slower + is_lent, len(cached)))
        ends_RG[0] = cached
        ends_RG[1 : 1 + num_slower] = self.slower_TG
        if is_lent:
            ends_RG[-1] = self.num_lent * self.takes_G
        others_RG = ends_RG[1:]
        np.minimum(others_RG, usable_blocks, out=others_RG)
        others_RG *= block_size
        np.maximum.accumulate(ends_RG, axis=0, out=ends_RG)
        num_RG = others_RG - ends_RG[:-1]
        if not num_RG.any():
            return None
        fixed_RG, share_RG = costs_2KG[:, _ROWS[num_slower, is_lent]]
        fixed_RG = fixed_RG - step_rest
        if is_lent:
            fixed_RG[-1] += self.source_rest
        costs_RG = share_RG * num_RG
        costs_RG += fixed_RG
        np.maximum(costs_RG, 0.0, out=costs_RG)
        if is_lent:
            # KV that arrives in the middle of the next step waits for the end of that step.
            costs_RG[-1] += (costs_RG[-1] > 0.0) * next_step
        saved_RG = num_RG - costs_RG
        is_worth_RG = (saved_RG >= _LEAST_SAVED[is_lent][-len(saved_RG) :]) & (
            fixed_RG <= PATIENCE * num_RG
        )
        num_RG *= is_worth_RG
        costs_RG *= is_worth_RG
        saved_RG *= is_worth_RG
        return Fetches(cached + saved_RG.sum(axis=0), num_RG, costs_RG, is_lent)
