"""Policies that know nothing of caches, and one that hashes instead of knowing."""

from collections.abc import Sequence
from math import ceil, inf
from random import Random

from quire.router.decide import distance_from
from quire.router.directory import GroupId
from quire.router.policy import GroupState, Reason, RouteRequest

RUNNING_TOKENS = 64.0
"""What a running sequence slows others by, in tokens of prefill. In simulations of five traces,
policies that rank a block of running context at about a twentieth of a block of prefill had the
lowest times to first token: 64 tokens is a context of some 1,300."""


class Forgetful:
    """A policy that keeps nothing from one request to the next."""

    pressure: float | None = None
    reads_steps: bool = False

    def second_home(
        self,
        request: RouteRequest,
        groups: Sequence[GroupState],
        hits: Sequence[int],
        home: int,
        num_coming: int,
    ) -> int:
        return home

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        pass

    def finished(self, request: RouteRequest, group: GroupId) -> None:
        pass

    def left(self, group: GroupId) -> None:
        pass


class RoundRobin(Forgetful):
    """The groups in turn, in the order of their names."""

    reason: Reason = "round_robin"

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        turn = sorted(state.group for state in groups)[request.ordinal % len(groups)]
        return [0.0 if state.group == turn else inf for state in groups]


class AnyGroup(Forgetful):
    """Any group; the same one for the same ordinal."""

    reason: Reason = "random"

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        drawn = Random(request.ordinal).choice(sorted(state.group for state in groups))
        return [0.0 if state.group == drawn else inf for state in groups]


class LeastLoaded(Forgetful):
    """The group with the least work queued and running, whatever it holds."""

    reason: Reason = "least_loaded"

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        return [s.num_queued_tokens + RUNNING_TOKENS * s.num_requests for s in groups]


class PowerOfTwo(Forgetful):
    """The one with fewer requests of two drawn at random (Mitzenmacher 2001; Serve's default)."""

    reason: Reason = "random"

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        names = sorted(state.group for state in groups)
        drawn = Random(request.ordinal).sample(names, k=min(2, len(names)))
        # A request more must count, and a tie is within TIE_TOKENS.
        return [64.0 * s.num_requests if s.group in drawn else inf for s in groups]


class BoundedHash(Forgetful):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), of the
    first block: the first group in the prefix's own order that has no more than 1.25 times its
    share of the requests. Rendezvous order stands for the ring."""

    reason: Reason = "consistent_hash"

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        loads = [state.num_requests for state in groups]
        cap = ceil(1.25 * (sum(loads) + 1) / len(groups))
        far = distance_from(request)
        order = sorted(range(len(groups)), key=lambda i: far(groups[i].group))
        costs = [inf] * len(groups)
        for rank, index in enumerate(order):
            if loads[index] < cap:
                costs[index] = 64.0 * rank
        return costs
