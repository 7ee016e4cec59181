"""Policies of other systems, from their publications; only the simulator runs them.

Each has its system's rule and defaults. All use our exact directory unless the name says otherwise,
so that rules are compared and not the quality of their information.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf
from random import Random
from types import MappingProxyType

import numpy as np

from quire.router.policies.catalog import POLICIES
from quire.router.policies.decide import distance_from
from quire.router.policies.fetching import KINDS, Elsewhere, Fetches
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column, GroupState, Policy, Reason, RouteRequest
from quire.router.policies.simple import OneByOne
from quire.router.prefix_index.directory import GroupId
from quire.simulate.prefix_memory import PrefixMemory
from quire.worker.blocks.hashing import BlockHash

_REQUEST = 64.0
"""Where a rule counts requests: more than what the common tie-break takes for a tie."""


class AnyGroup(OneByOne):
    """Any group; the same one for the same ordinal."""

    reason: Reason = "random"

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        drawn = Random(request.ordinal).choice(sorted(state.group for state in groups))
        return [0.0 if state.group == drawn else inf for state in groups]


class BoundedHash(OneByOne):
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), of the
    first block: the first group in the prefix's own order that has no more than 1.25 times its
    share of the requests. Rendezvous order stands for the ring."""

    reason: Reason = "consistent_hash"

    def costs_of(
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


class SglangCacheAware(OneByOne):
    """SGLang's router, ``cache_aware``, with its defaults (sgl-router, README and CLI).

    Where requests in flight differ by more than 64 and by more than half, the fewest win. Else
    the longest match wins if it is more than 30 % of the prompt, else the group with the smallest
    tree. ``approximate`` matches what was sent (its tree); otherwise what events say.
    """

    reason: Reason = "least_loaded"

    def __init__(self, *, approximate: bool) -> None:
        self._sent = PrefixMemory(max_blocks=32_768)  # 2**24 characters per group.
        self._approximate = approximate

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        loads = [state.num_requests for state in groups]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return [_REQUEST * load for load in loads]
        if self._approximate:
            names = [state.group for state in groups]
            lengths = self._sent.lengths(request.hashes, names)
            hits = [n * request.block_size for n in lengths]
        if max(hits) > 0.3 * request.num_prompt_tokens:
            return [-_REQUEST * num_hit for num_hit in hits]
        if self._approximate:
            return [_REQUEST * self._sent.num_blocks(state.group) for state in groups]
        return [_REQUEST * load for load in loads]

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        if self._approximate:
            self._sent.add(request.hashes, group)

    def left(self, group: GroupId) -> None:
        self._sent.drop(group)


class RayPrefixAffinity(OneByOne):
    """Ray Serve LLM's ``PrefixCacheAffinityRouter`` with its defaults (ray.llm, 2.60).

    The longest match of what was sent wins if it is at least 10 % of the prompt, however loaded;
    else the group to which the fewest characters were sent. Among several, the power of two
    choices. Its eviction is off by default, with which a router grows without end; here the blocks
    that were sent to a group least recently are forgotten past ``max_blocks``.
    """

    reason: Reason = "least_loaded"

    def __init__(self, *, max_blocks: int = 2**17) -> None:
        self._sent = PrefixMemory(max_blocks=max_blocks)

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        names = [state.group for state in groups]
        lengths = self._sent.lengths(request.hashes, names)
        if max(lengths) * request.block_size >= 0.1 * request.num_prompt_tokens:
            keep = [n == max(lengths) for n in lengths]
        else:
            sizes = [self._sent.num_blocks(name) for name in names]
            keep = [size == min(sizes) for size in sizes]
        kept = sorted(name for name, is_kept in zip(names, keep, strict=True) if is_kept)
        drawn = Random(request.ordinal).sample(kept, k=min(2, len(kept)))
        return [_REQUEST * s.num_requests if s.group in drawn else inf for s in groups]

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        self._sent.add(request.hashes, group)

    def left(self, group: GroupId) -> None:
        self._sent.drop(group)


class LlmdScorers(OneByOne):
    """llm-d's inference scheduler: prefix : queue : KV scorers as 3 : 2 : 2 (its default profile).

    Prefix is the matched share of the prompt, queue is 1 for the shortest and 0 for the longest,
    KV the share of the cache that no running sequence holds. The highest sum wins.
    """

    reason: Reason = "least_loaded"

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        queues = [state.num_waiting + state.num_reserved_requests for state in groups]
        longest, shortest = max(queues), min(queues)
        spread = max(longest - shortest, 1)
        num_tokens = max(request.num_prompt_tokens, 1)
        return [
            # Scaled up, for differences below TIE_TOKENS count as ties.
            -1e9 * (3 * hit / num_tokens + 2 * (longest - queue) / spread + 2 * (1 - state.fill))
            for state, queue, hit in zip(groups, queues, hits, strict=True)
        ]


class Preble(OneByOne):
    """Preble's E2 (Srivatsa et al., ICLR 2025), section 3.2.

    Where the longest match is more than half of the prompt it is exploited, unless that group's
    load over the last three minutes is more than twice the least. Else the least of load, plus
    what is evicted for it times how often such is hit, plus the prefill of what is missing.
    """

    reason: Reason = "least_loaded"
    _WINDOW_S = 180.0

    def __init__(self) -> None:
        self._sent: dict[GroupId, deque[tuple[float, int]]] = defaultdict(deque)
        self._loads: dict[GroupId, int] = defaultdict(int)
        self._num_tokens = self._num_hit_tokens = 1
        self._hits: dict[GroupId, int] = {}

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        self._hits = {s.group: hit for s, hit in zip(groups, hits, strict=True)}
        loads = [self._load(state.group, request.now_s) for state in groups]
        longest = max(hits)
        if 2 * longest > request.num_prompt_tokens:
            best = min(load for load, hit in zip(loads, hits, strict=True) if hit == longest)
            if best <= 2 * min(loads) + request.num_prompt_tokens:
                return [
                    float(load) if hit == longest else inf
                    for load, hit in zip(loads, hits, strict=True)
                ]
        reuse = self._num_hit_tokens / self._num_tokens
        return [
            load + (1 + reuse) * (request.num_prompt_tokens - hit)
            for load, hit in zip(loads, hits, strict=True)
        ]

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        num_hit = self._hits.get(group, 0)
        work = request.num_prompt_tokens - num_hit
        self._sent[group].append((request.now_s, work))
        self._loads[group] += work
        self._num_tokens += request.num_prompt_tokens
        self._num_hit_tokens += num_hit

    def left(self, group: GroupId) -> None:
        for kept in (self._sent, self._loads, self._hits):
            kept.pop(group, None)

    def _load(self, group: GroupId, now_s: float) -> int:
        sent = self._sent[group]
        while sent and sent[0][0] < now_s - self._WINDOW_S:
            self._loads[group] -= sent.popleft()[1]
        return self._loads[group]


class Mooncake(OneByOne):
    """Mooncake's Conductor (Qin et al., FAST 2025, algorithm 1) without fetching from peers:
    the least of what is queued and the prefill of what is missing."""

    reason: Reason = "least_loaded"

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        num_tokens = request.num_prompt_tokens
        return [
            state.num_queued_tokens + num_tokens - float(hit)
            for state, hit in zip(groups, hits, strict=True)
        ]


class MooncakeFetching(Mooncake):
    """The whole of that rule. A group computes on from its own prefix unless another one's is
    ``balancing`` times as long: then it fetches that, and waits until all of it is there. What it
    fetches it keeps, so that hot prefixes spread. The time to the first token that decides is the
    sum of transfer, queue and prefill.

    The paper names no value for ``balancing``: of 1 to 4 the last one was best for it. Transfer
    times are estimated as our policy does, from what transfers took.
    """

    def __init__(self, *, balancing: float) -> None:
        self._balancing = balancing

    def fetches(
        self, request: RouteRequest, groups: Loads, cached: Column, elsewhere: Elsewhere
    ) -> Fetches | None:
        own = cached
        if len(elsewhere.slower_TG):
            num_blocks = np.minimum(elsewhere.slower_TG[-1], request.usable_blocks)
            own = np.maximum(cached, num_blocks * request.block_size)
        num_lent = min(elsewhere.num_lent, request.usable_blocks) * request.block_size
        is_far = (num_lent > self._balancing * own) * elsewhere.takes_G
        num_tokens = np.maximum(num_lent - own, 0.0) * is_far
        fixed, share = groups.fetch_costs_2KG[:, KINDS.index("peer")]
        costs = (fixed + share * num_tokens) * (num_tokens > 0)
        num_RG = np.array([own - cached, num_tokens])
        return Fetches(own + num_tokens - costs, num_RG, np.array([0 * costs, costs]), True)


class DynamoCost(OneByOne):
    """NVIDIA Dynamo's KV router: ``weight * prefill blocks + decode blocks``, temperature 0.

    Prefill counts what is queued and what this request lacks; decode counts the different blocks
    of all requests that were sent and have not ended, this one's included, as its router tracks
    them itself. The default weight is 1; 20 was found to be good.
    """

    reason: Reason = "least_loaded"

    def __init__(self, *, weight: float) -> None:
        self._weight = weight
        self._active: dict[GroupId, Counter[BlockHash]] = defaultdict(Counter)
        self._num_ends: dict[GroupId, int] = defaultdict(int)  # Partial blocks at prompts' ends.

    def costs_of(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        hashes, num_tokens, size = request.hashes, request.num_prompt_tokens, request.block_size
        costs = []
        for state, hit in zip(groups, hits, strict=True):
            active = self._active[state.group]
            shared = 0
            while shared < len(hashes) and hashes[shared] in active:
                shared += 1
            decode = len(active) + self._num_ends[state.group] + len(hashes) - shared
            prefill = state.num_pending_prefill_tokens + state.num_reserved_tokens
            costs.append(self._weight * (prefill + num_tokens - hit) + decode * size)
        return costs

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        self._active[group].update(request.hashes)
        self._num_ends[group] += 1

    def finished(self, request: RouteRequest, group: GroupId) -> None:
        self._num_ends[group] -= 1
        active = self._active[group]
        for block in request.hashes:
            if active[block] == 1:
                del active[block]
            else:
                active[block] -= 1

    def left(self, group: GroupId) -> None:
        if not self._num_ends[group]:  # Else what is under way there still ends.
            del self._num_ends[group], self._active[group]


SIMULATED_POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        **POLICIES,
        "random": AnyGroup,
        "bounded_hash": BoundedHash,
        "sglang": partial(SglangCacheAware, approximate=True),
        "sglang_events": partial(SglangCacheAware, approximate=False),
        "ray_prefix": RayPrefixAffinity,
        "llmd": LlmdScorers,
        "preble": Preble,
        "mooncake": Mooncake,
        "mooncake_fetch": partial(MooncakeFetching, balancing=4.0),
        "dynamo": partial(DynamoCost, weight=1.0),
        "dynamo_20": partial(DynamoCost, weight=20.0),
    }
)
"""Those that serve, and those to compare them with, by name."""
