"""Which group takes a request: pure functions of the request, the groups' load and their prefixes.

`prefix_aware` takes the group with the least cost. A cost is counted in *tokens*, the time in
which a group prefills one prompt token, and has four terms:

    queued    prompt tokens that the group must compute before this request's: the wait
    prefill   the request's own tokens without a cached prefix, times ``PREFILL_WEIGHT``
    running   ``RUNNING_TOKENS`` for each sequence that shares the group's steps
    shortage  tokens for which the group has no block, times ``SHORTAGE_WEIGHT``

Among groups within ``TIE_TOKENS`` of the least cost, the longest cached prefix decides, then
rendezvous hashing of the prompt's first block: gateways that know nothing of each other so send
the same cold prefix to the same group. The other policies are baselines.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Literal

from quire.router.directory import GroupId
from quire.router.errors import NoGroupAvailable
from quire.worker.hashing import BlockHash

PREFILL_WEIGHT = 2.0
"""A prefill is paid by this request and again by whoever comes next. At 1, waiting for a prefix
that a group just computes would cost as much as computing it again elsewhere."""

RUNNING_TOKENS = 64.0
"""In simulations of five traces, policies that rank a block of running context at about a
twentieth of a block of prefill had the lowest times to first token: 64 tokens is a context of
some 1,300."""

SHORTAGE_WEIGHT = 8.0
"""Room that is missing comes from sequences that end or are preempted, and those need many steps
or have to be computed again: much dearer than computing a token, but not a reason to refuse."""

TIE_TOKENS = 32.0
"""Less than one running sequence: what differs by less does not tell groups apart."""

Reason = Literal["cached_prefix", "least_loaded", "only_group", "round_robin", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a policy may know of a request."""

    hashes: Sequence[BlockHash]
    """Of the prompt's full blocks."""
    num_prompt_tokens: int
    block_size: int
    exclude: frozenset[GroupId] = frozenset()
    """Groups that must not take it: they failed it before, or are draining."""
    ordinal: int = 0
    """How many requests were routed before it; stands in for randomness and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A group's load: what its last frame said, and what was sent to it since."""

    group: GroupId
    num_running: int = 0
    num_waiting: int = 0
    num_pending_prefill_tokens: int = 0
    """Prompt tokens neither cached nor computed yet, of waiting and running requests."""
    num_available_blocks: int | None = None
    """Free ones and cached ones that may be evicted; None before the group's first frame."""
    num_reserved_requests: int = 0
    """Sent, but not in the numbers above yet."""
    num_reserved_tokens: int = 0
    """Tokens that those have to prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One group's part in a decision, for its explanation. All but the group in tokens."""

    group: GroupId
    cost: float
    num_cached_tokens: int
    num_prefill_tokens: int
    num_queued_tokens: int
    num_sequences: int
    num_shortage_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    group: GroupId
    reason: Reason
    predicted_cached_tokens: int
    candidates: tuple[Candidate, ...] = field(repr=False)


Policy = Callable[[RouteRequest, Sequence[GroupState], Mapping[GroupId, int]], Decision]
"""Decides by request, groups and the blocks that each group holds of the prompt's beginning.

Raises:
    NoGroupAvailable: Every group is excluded, or there is none.
"""


def prefix_aware(
    request: RouteRequest, groups: Sequence[GroupState], overlap: Mapping[GroupId, int]
) -> Decision:
    """The group with the least predicted time to first token (see the module's docstring).

    The reason is "cached_prefix" where the chosen group holds a prefix and none holds a longer.
    """
    candidates = _candidates(request, groups, overlap)
    limit = min(candidate.cost for candidate in candidates) + TIE_TOKENS
    tied = [candidate for candidate in candidates if candidate.cost <= limit]
    chosen = min(tied, key=lambda c: (-c.num_cached_tokens, _distance(request, c.group)))
    longest = max(candidate.num_cached_tokens for candidate in candidates)
    holds_most = 0 < chosen.num_cached_tokens == longest
    return _decide(chosen, candidates, "cached_prefix" if holds_most else "least_loaded")


def least_loaded(
    request: RouteRequest, groups: Sequence[GroupState], overlap: Mapping[GroupId, int]
) -> Decision:
    """The group with the least work queued and running, whatever it holds."""
    candidates = _candidates(request, groups, overlap)
    chosen = min(
        candidates,
        key=lambda c: (
            c.num_queued_tokens + RUNNING_TOKENS * c.num_sequences,
            _distance(request, c.group),
        ),
    )
    return _decide(chosen, candidates, "least_loaded")


def round_robin(
    request: RouteRequest, groups: Sequence[GroupState], overlap: Mapping[GroupId, int]
) -> Decision:
    """The groups in turn, in the order of their names."""
    candidates = _candidates(request, groups, overlap)
    turn = _by_name(candidates)[request.ordinal % len(candidates)]
    return _decide(turn, candidates, "round_robin")


def random(
    request: RouteRequest, groups: Sequence[GroupState], overlap: Mapping[GroupId, int]
) -> Decision:
    """Any group; the same one for the same ordinal."""
    candidates = _candidates(request, groups, overlap)
    drawn = Random(request.ordinal).choice(_by_name(candidates))
    return _decide(drawn, candidates, "random")


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "prefix_aware": prefix_aware,
        "least_loaded": least_loaded,
        "round_robin": round_robin,
        "random": random,
    }
)


def _candidates(
    request: RouteRequest, groups: Sequence[GroupState], overlap: Mapping[GroupId, int]
) -> tuple[Candidate, ...]:
    candidates = tuple(
        _candidate(request, group, overlap.get(group.group, 0))
        for group in groups
        if group.group not in request.exclude
    )
    if not candidates:
        raise NoGroupAvailable(num_groups=len(groups), num_excluded=len(groups))
    return candidates


def _candidate(request: RouteRequest, group: GroupState, num_held_blocks: int) -> Candidate:
    # The engine computes at least the last token, whose logits it samples from, so the block
    # that ends with it is never a hit.
    num_usable_blocks = max(request.num_prompt_tokens - 1, 0) // request.block_size
    num_cached = min(num_held_blocks, num_usable_blocks) * request.block_size
    num_prefill = request.num_prompt_tokens - num_cached
    num_queued = group.num_pending_prefill_tokens + group.num_reserved_tokens
    num_sequences = group.num_running + group.num_waiting + group.num_reserved_requests
    num_short = 0
    if group.num_available_blocks is not None:
        room = group.num_available_blocks * request.block_size
        num_short = max(num_prefill + num_queued - room, 0)
    cost = (
        num_queued
        + PREFILL_WEIGHT * num_prefill
        + RUNNING_TOKENS * num_sequences
        + SHORTAGE_WEIGHT * num_short
    )
    return Candidate(
        group=group.group,
        cost=cost,
        num_cached_tokens=num_cached,
        num_prefill_tokens=num_prefill,
        num_queued_tokens=num_queued,
        num_sequences=num_sequences,
        num_shortage_tokens=num_short,
    )


def _by_name(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.group)


def _decide(chosen: Candidate, candidates: tuple[Candidate, ...], reason: Reason) -> Decision:
    return Decision(
        group=chosen.group,
        reason="only_group" if len(candidates) == 1 else reason,
        predicted_cached_tokens=chosen.num_cached_tokens,
        candidates=candidates,
    )


def _distance(request: RouteRequest, group: GroupId) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): when a group joins or leaves, only the
    prefixes that it gains or held move. Prompts shorter than a block have no prefix and spread.
    """
    name = request.hashes[0] if request.hashes else request.ordinal.to_bytes(8, "little")
    return hashlib.blake2b(group.encode(), key=name, digest_size=8).digest()
