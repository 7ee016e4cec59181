"""A second, plain implementation of our routing policy, for comparison. It keeps all history."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log2

from quire.router.policies.policy import GroupState, RouteRequest
from quire.worker.blocks.hashing import BlockHash


@dataclass
class WrittenOut:
    fresh: float = 3072.0
    num_seen: int = 20
    last_costs: list[float] = field(default_factory=list)
    regrets: list[tuple[BlockHash, float]] = field(default_factory=list)

    def cost(self, state: GroupState, missing: float, now_s: float) -> float:
        queued = state.num_pending_prefill_tokens + state.num_reserved_tokens
        behind = min((queued + missing / 16) / self.fresh, 12.0)
        rest = 24.0 * (state.num_running + state.num_waiting)
        beside = rest + 24.0 * state.num_reserved_requests
        if state.step_s:
            share = (now_s - state.step_began_s) / state.step_s
            if 0 < share < 2:
                rest -= min(share, 1.0) * (rest + state.num_step_tokens)
        return queued + (rest + beside) + (1.25 + behind) * missing

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        num_tokens = request.num_prompt_tokens
        self.last_costs = [
            self.cost(state, num_tokens - hit, request.now_s)
            for state, hit in zip(groups, hits, strict=True)
        ]
        self.num_seen += 1
        self.fresh += (num_tokens - max(hits) - self.fresh) / self.num_seen
        self.fresh = min(max(self.fresh, 128.0), 8192.0)
        return self.last_costs

    def chosen(
        self,
        request: RouteRequest,
        groups: Sequence[GroupState],
        hits: Sequence[int],
        cached: Sequence[int],
    ) -> int:
        home = first_of(request, groups, hits, self.costs(request, groups, hits))
        missing = request.num_prompt_tokens - hits[home]
        costs = [self.cost(state, missing, request.now_s) for state in groups]
        other = first_of(request, groups, hits, costs)
        blocks = request.hashes[hits[other] // 16 : hits[home] // 16]
        if not blocks:
            self.regrets.append((BlockHash(b""), 0.0))
            return home
        begun = costs[home] - max(hits[home] - 16 * cached[home], 0)
        saved = sum(max(begun - cost, 0.0) for cost in costs)
        key = blocks[2 ** int(log2(len(blocks))) - 1]
        self.regrets.append((key, saved / (len(costs) - 1)))
        paid, fading = 0.0, exp(-1 / (1000 * len(groups)))
        for name, amount in self.regrets:
            paid = paid * fading + amount * (name == key)
        ties = [i for i, each in enumerate(costs) if each <= min(costs) + 32]
        first = next(i for i in ties if hits[i] == hits[other])
        missing = request.num_prompt_tokens - hits[other]
        if paid < 4 * (self.cost(groups[first], missing, request.now_s) - costs[first]):
            return home
        self.regrets = [(BlockHash(b"") if n == key else n, amount) for n, amount in self.regrets]
        return other


def first_of(
    request: RouteRequest,
    groups: Sequence[GroupState],
    hits: Sequence[int],
    costs: Sequence[float],
) -> int:
    """Index of the cheapest group. Ties go to the longest hit, then by a hash with the prefix."""
    name = request.hashes[0] if request.hashes else request.ordinal.to_bytes(8, "little")

    def place(index: int) -> tuple[bool, int, bytes]:
        digest = hashlib.blake2b(groups[index].group.encode(), key=name, digest_size=8).digest()
        return costs[index] > min(costs) + 32, -hits[index], digest

    return min(range(len(groups)), key=place)
