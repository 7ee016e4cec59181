"""Chooses the group for a request: the least cost; all gateways break ties the same way."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quire.router.errors import NoGroupAvailable
from quire.router.policies.fetching import Elsewhere
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, Decision, Policy, RouteRequest
from quire.router.prefix_index.directory import GroupId

TIE_TOKENS = 32.0
"""Costs that differ by less than this are a tie."""


def decide(
    policy: Policy,
    request: RouteRequest,
    groups: Loads,
    overlap: npt.ArrayLike,
    cached: Sequence[int] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Decision:
    """Chooses one of ``groups``. ``overlap``: for each group, how many leading blocks of the prompt
    are in its KV cache or being computed. ``cached``: how many of those are in the cache; by
    default all. ``elsewhere``: other places that hold blocks of the prompt; by default none.

    Raises:
        NoGroupAvailable: Every group is excluded, or there is none.
    """
    num_groups, overlap = len(groups), np.asarray(overlap, dtype=np.int64)
    held: Sequence[int] | npt.NDArray[np.int64] = overlap if cached is None else cached
    if request.exclude:
        allowed = [i for i, each in enumerate(groups.states) if each.group not in request.exclude]
        groups, overlap = groups.only(allowed), overlap[allowed]
        held = [held[i] for i in allowed]
        elsewhere = elsewhere and elsewhere.only(allowed)
    if not len(groups):
        raise NoGroupAvailable(num_groups=num_groups)
    hits = own = np.minimum(overlap, request.usable_blocks) * float(request.block_size)
    fetches = None
    if elsewhere is not None:
        fetches = policy.fetches(request, groups, own, elsewhere)
        hits = own if fetches is None else fetches.hits
    costs = policy.costs(request, groups, hits)
    index = home = cheapest(request, groups, hits, costs)
    if hits[home] > hits.min():
        num_coming = max(int(own[home]) - int(held[home]) * request.block_size, 0)
        index = policy.second_home(request, groups, hits, home, num_coming)
    state, num_hit_tokens = groups.states[index], int(hits[index])
    num_found, source = int(own[index]), None
    if fetches is not None:
        num_found += int(fetches.num_RG[:, index].sum())
        if elsewhere is not None and fetches.num_lent(index):
            source = elsewhere.source
    reason = policy.reason
    if len(groups) == 1:
        reason = "only_group"
    elif index != home:
        reason = "copied_prefix"
    elif num_found > 2 * own[index]:
        reason = "fetched_prefix"
    elif 0 < num_hit_tokens == int(hits.max()):
        reason = "cached_prefix"
    elif request.adapter in state.adapters and any(map(request.lacks_adapter, groups.states)):
        reason = "loaded_adapter"
    policy.routed(request, state.group)
    return Decision(
        group=state.group,
        reason=reason,
        predicted_cached_tokens=num_found,
        num_prompt_tokens=request.num_prompt_tokens,
        groups=groups.states.copy(),  # The list changes later; the states in it do not.
        index=index,
        forecast_s=state.forecast_s(request.num_prompt_tokens - num_hit_tokens),
        cached=own,
        costs=costs,
        fetches=fetches,
        source=source,
        num_source_blocks=elsewhere.num_lent if elsewhere is not None and source else 0,
        adapter_costs=policy.adapter_costs,
    )


def cheapest(request: RouteRequest, groups: Loads, hits: Column, costs: Column) -> int:
    """The index of the least cost. Ties go to the longest hit, then by rendezvous hashing.

    So gateways send the same uncached prefix to the same group without talking to each other.
    """
    return nearest(request, groups, tied(hits, costs))


def tied(hits: Column, costs: Column) -> list[int]:
    """The indices with the longest hit among those within `TIE_TOKENS` of the least cost."""
    ties = (costs <= costs.min() + TIE_TOKENS).nonzero()[0]
    if len(ties) > 1:
        tied_hits = hits[ties]
        ties = ties[tied_hits == tied_hits.max()]
    indices: list[int] = ties.tolist()
    return indices


def nearest(request: RouteRequest, groups: Loads, indices: Sequence[int]) -> int:
    """The index whose group is first by `distance_from` the request's prefix or adapter."""
    if len(indices) == 1:
        return indices[0]
    states = groups.states
    is_cold = all(request.lacks_adapter(states[i]) for i in indices)
    far = distance_from(request, is_cold=is_cold)
    return min(indices, key=lambda i: far(states[i].group))


def distance_from(request: RouteRequest, *, is_cold: bool = False) -> Callable[[GroupId], bytes]:
    """A group's rank for the request by rendezvous hashing (Thaler and Ravishankar, 1998): when a
    group joins or leaves, only the prefixes that it gains or held move. The key is the prompt's
    first block; prompts shorter than a block spread. ``is_cold``: no group has loaded the request's
    adapter, which is then the key. A ``cache_key`` replaces both."""
    name = request.hashes[0] if request.hashes else request.ordinal.to_bytes(8, "little")
    if request.cache_key:
        name = hashlib.blake2b(request.cache_key.encode()).digest()
    elif is_cold:
        name = request.adapter.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
    begun = hashlib.blake2b(key=name, digest_size=8)

    def distance(group: GroupId) -> bytes:
        hashed = begun.copy()  # Takes half as long as hashing from the start.
        hashed.update(group.encode())
        return hashed.digest()

    return distance
