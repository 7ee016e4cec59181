"""Rates between two snapshots of a gateway's groups: speeds, shares and waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Self

from quire.v1 import admin_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The speed of one group, or of several together."""

    prompt_per_s: float = 0.0
    """Prompt tokens of started requests, per second."""
    output_per_s: float = 0.0
    """Generated tokens per second."""
    hit_rate: float | None = None
    """Share of prompt tokens that was cached; ``None`` without prompt tokens."""
    kv_use: float = 0.0
    """Share of the KV cache that requests use at the later snapshot."""

    @classmethod
    def between(
        cls, before: Iterable[pb.Group], after: Iterable[pb.Group], *, interval_s: float
    ) -> Self:
        """The rates over ``interval_s`` between two snapshots. Groups missing from the first do not
        count."""
        former = {group.id: group for group in before}
        prompt = hits = output = held = blocks = 0
        for group in after:
            held += group.num_held_blocks
            blocks += group.num_blocks
            # A restarted group has the same name and counts from 0.
            if (old := former.get(group.id)) and old.num_output_tokens <= group.num_output_tokens:
                prompt += group.num_prompt_tokens - old.num_prompt_tokens
                hits += group.num_hit_tokens - old.num_hit_tokens
                output += group.num_output_tokens - old.num_output_tokens
        return cls(
            prompt_per_s=prompt / interval_s,
            output_per_s=output / interval_s,
            hit_rate=hits / prompt if prompt else None,
            kv_use=held / blocks if blocks else 0.0,
        )


def first_token_s(before: pb.GatewayLoad, after: pb.GatewayLoad, share: float) -> float | None:
    """An upper bound in seconds (of a histogram bucket) for the given ``share`` of the times to the
    first token between two snapshots; ``None`` without any."""
    if not after.ttft_counts:
        return None
    former = list(before.ttft_counts) or [0] * len(after.ttft_counts)
    counts = [new - old for new, old in zip(after.ttft_counts, former, strict=True)]
    wanted, seen = share * sum(counts), 0
    for bound_s, count in zip([*after.ttft_bounds_s, inf], counts, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound_s
    return None


def status_line(
    before: pb.ListGroupsResponse, after: pb.ListGroupsResponse, *, interval_s: float
) -> str:
    """The state of a whole gateway in one line."""
    groups = after.groups
    rates = Rates.between(before.groups, groups, interval_s=interval_s)
    num_ready = sum(group.state == pb.Group.SERVING for group in groups)
    num_groups = max(len(groups), after.num_groups)
    running = sum(group.num_running for group in groups)
    waiting = sum(group.num_waiting for group in groups) + after.gateway.num_queued
    hit = "-" if rates.hit_rate is None else f"{rates.hit_rate:.0%}"
    return (
        f"{num_ready} of {num_groups} groups, {running} running, {waiting} waiting, "
        f"prompts {rates.prompt_per_s:,.0f} tokens/s ({hit} cached), "
        f"output {rates.output_per_s:,.0f} tokens/s, KV {rates.kv_use:.0%}"
    )


def is_busy(before: pb.ListGroupsResponse, after: pb.ListGroupsResponse) -> bool:
    """Whether any request ran between two snapshots."""
    rates = Rates.between(before.groups, after.groups, interval_s=1.0)
    return (
        rates.output_per_s > 0
        or rates.prompt_per_s > 0
        or any(g.num_requests for g in after.groups)
    )
