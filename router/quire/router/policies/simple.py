"""Cache-unaware policies: round robin, least loaded, power of two choices."""

from abc import abstractmethod
from collections.abc import Sequence
from math import inf
from random import Random

import numpy as np

from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, GroupState, Policy, Reason, RouteRequest

RUNNING_TOKENS = 64.0
"""Delay that a running sequence causes to others, in tokens of prefill. In simulations of five
traces, policies that weigh a block of running context at about a twentieth of a block of prefill
had the lowest times to first token: 64 tokens is a context of some 1,300."""


class OneByOne(Policy):
    """Base of policies that compute costs group by group rather than with arrays."""

    def costs(self, request: RouteRequest, groups: Loads, hits: Column) -> Column:
        num_hits = [int(hit) for hit in hits]
        return np.array(self.costs_of(request, groups.states, num_hits), dtype=float)

    @abstractmethod
    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> Sequence[float]:
        """The cost of each group, in their order."""


class RoundRobin(OneByOne):
    """Takes the groups in turn, in the order of their names."""

    reason: Reason = "round_robin"

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        turn = sorted(state.group for state in groups)[request.ordinal % len(groups)]
        return [0.0 if state.group == turn else inf for state in groups]


class LeastLoaded(Policy):
    """Takes the group with the least work queued and running, regardless of its cache."""

    reason: Reason = "least_loaded"

    def costs(self, request: RouteRequest, groups: Loads, hits: Column) -> Column:
        return groups.num_queued_tokens + RUNNING_TOKENS * groups.num_requests


class PowerOfTwo(OneByOne):
    """Draws two groups at random and takes the one with fewer requests (Mitzenmacher 2001; the
    default of Ray Serve)."""

    reason: Reason = "random"

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        names = sorted(state.group for state in groups)
        drawn = Random(request.ordinal).sample(names, k=min(2, len(names)))
        # One request must cost more than TIE_TOKENS, or it would be a tie.
        return [64.0 * s.num_requests if s.group in drawn else inf for s in groups]
