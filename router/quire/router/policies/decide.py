"""Chooses the group for a request: the least cost, with ties decided alike by all gateways.

`decide` looks at one group after the other, `decide_among_many` at arrays over all of them, with a
policy that can (`quire.router.policies.loads`). For the same loads they take the same decision.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.router.errors import NoGroupAvailable
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, Decision, GroupState, Policy, RouteRequest
from quire.router.prefix_index.directory import GroupId

TIE_TOKENS = 32.0
"""Costs that differ by less than this are a tie."""


@runtime_checkable
class PolicyOfMany(Policy, Protocol):
    """Also takes many groups at once."""

    def costs_of_many(self, request: RouteRequest, loads: Loads, hits: Column) -> Column:
        """What `costs` says of the same groups, to the last bit."""


def decide(
    policy: Policy,
    request: RouteRequest,
    groups: Sequence[GroupState],
    overlap: Sequence[int],
) -> Decision:
    """Chooses one of ``groups``. ``overlap`` counts the prompt's leading blocks that each group has
    cached or is computing.

    Raises:
        NoGroupAvailable: Every group is excluded, or there is none.
    """
    num_groups = len(groups)
    if request.exclude:
        allowed = [i for i, state in enumerate(groups) if state.group not in request.exclude]
        groups, overlap = [groups[i] for i in allowed], [overlap[i] for i in allowed]
    if not groups:
        raise NoGroupAvailable(num_groups=num_groups, num_excluded=num_groups)
    hits = usable_tokens(request, overlap)
    index, costs = choose(policy, request, groups, hits)
    return _taken(policy, request, groups, hits, costs, index, max(hits))


def decide_among_many(
    policy: PolicyOfMany,
    request: RouteRequest,
    loads: Loads,
    overlap: npt.NDArray[np.int64],
) -> Decision:
    """`decide`, in a time that hardly grows with the number of groups.

    Raises:
        NoGroupAvailable: Every group is excluded, or there is none.
    """
    num_groups = len(loads)
    if request.exclude:
        states = loads.states
        allowed = [i for i, state in enumerate(states) if state.group not in request.exclude]
        loads, overlap = loads.only(allowed), overlap[allowed]
    if not len(loads):
        raise NoGroupAvailable(num_groups=num_groups, num_excluded=num_groups)
    hits = np.minimum(overlap, usable_blocks(request)) * float(request.block_size)
    index, costs = choose_among_many(policy, request, loads, hits)
    # The list goes on to change, the states in it do not.
    states = loads.states.copy()
    return _taken(policy, request, states, hits, costs, index, hits.max())


def choose(
    policy: Policy,
    request: RouteRequest,
    groups: Sequence[GroupState],
    hits: Sequence[int],
) -> tuple[int, list[float]]:
    """The index of the cheapest group, and all costs."""
    costs = policy.costs(request, groups, hits)
    return cheapest(request, groups, hits, costs), costs


def choose_among_many(
    policy: PolicyOfMany, request: RouteRequest, loads: Loads, hits: Column
) -> tuple[int, Column]:
    """`choose`, of arrays."""
    costs = policy.costs_of_many(request, loads, hits)
    return cheapest_of_many(request, loads, hits, costs), costs


def usable_tokens(request: RouteRequest, overlap: Sequence[int]) -> list[int]:
    """The tokens that those leading blocks save."""
    block_size, limit = request.block_size, usable_blocks(request)
    return [(n if n < limit else limit) * block_size for n in overlap]


def usable_blocks(request: RouteRequest) -> int:
    """The most blocks that can be a hit.

    The engine computes at least the last token, whose logits it samples from, so the block that
    ends with it is never one.
    """
    return max(request.num_prompt_tokens - 1, 0) // request.block_size


def cheapest(
    request: RouteRequest,
    groups: Sequence[GroupState],
    hits: Sequence[int],
    costs: Sequence[float],
) -> int:
    """The index of the least cost; among ties the longest hit decides, then the prefix's name.

    So gateways that know nothing of each other send the same cold prefix to the same group.
    """
    return nearest(request, groups, tied(hits, costs))


def tied(hits: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The indices of the least cost and those that tie with it, of them those with the longest
    hit."""
    limit = min(costs) + TIE_TOKENS
    ties = [i for i, cost in enumerate(costs) if cost <= limit]
    if len(ties) == 1:
        return ties
    longest = max([hits[i] for i in ties])
    return [i for i in ties if hits[i] == longest]


def cheapest_of_many(request: RouteRequest, loads: Loads, hits: Column, costs: Column) -> int:
    """`cheapest`, of arrays."""
    return nearest(request, loads.states, tied_of_many(hits, costs))


def tied_of_many(hits: Column, costs: Column) -> list[int]:
    """`tied`, of arrays."""
    ties = (costs <= costs.min() + TIE_TOKENS).nonzero()[0]
    if len(ties) > 1:
        tied_hits = hits[ties]
        ties = ties[tied_hits == tied_hits.max()]
    indices: list[int] = ties.tolist()
    return indices


def nearest(request: RouteRequest, groups: Sequence[GroupState], indices: Sequence[int]) -> int:
    """Which of these groups the prefix's name is for."""
    if len(indices) == 1:
        return indices[0]
    far = distance_from(request)
    return min(indices, key=lambda i: far(groups[i].group))


def distance_from(request: RouteRequest) -> Callable[[GroupId], bytes]:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): when a group joins or leaves, only the
    prefixes that it gains or held move. Prompts shorter than a block have no prefix and spread.
    """
    name = request.hashes[0] if request.hashes else request.ordinal.to_bytes(8, "little")
    begun = hashlib.blake2b(key=name, digest_size=8)

    def distance(group: GroupId) -> bytes:
        hashed = begun.copy()  # Half the time of a new hash.
        hashed.update(group.encode())
        return hashed.digest()

    return distance


def _taken(
    policy: Policy,
    request: RouteRequest,
    groups: Sequence[GroupState],
    hits: Sequence[int] | Column,
    costs: Sequence[float] | Column,
    index: int,
    longest: float,
) -> Decision:
    state, num_hit_tokens = groups[index], int(hits[index])
    reason = policy.reason
    if len(groups) == 1:
        reason = "only_group"
    elif 0 < num_hit_tokens == longest:
        reason = "cached_prefix"
    policy.routed(request, state.group)
    return Decision(
        group=state.group,
        reason=reason,
        predicted_cached_tokens=num_hit_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        groups=groups,
        index=index,
        forecast_s=state.forecast_s(request.num_prompt_tokens - num_hit_tokens),
        hits=hits,
        costs=costs,
    )
