"""Rows of the live page as JSON: groups, calls, decisions and prefixes."""

from collections.abc import Sequence
from typing import Any

from quire.cluster.links.group_client import GroupClient
from quire.cluster.telemetry.timeline import Timeline
from quire.router.decision_log import Explanation
from quire.router.hot_prefixes import HotPrefix
from quire.v1 import group_pb2 as pb

Row = dict[str, Any]

_NAME_BYTES = 6
"""Bytes of a block's hash that identify it on the page."""
_MAX_CHARS = 200
MAX_ATTEMPTS = 16
"""Most attempts of a call in its row; the last ones are shown."""


def group_row(
    client: GroupClient,
    load: pb.Load | None,
    *,
    name: str,
    model: str,
    is_routed_to: bool,
    tokens_per_s: float,
    hit_rate: float | None,
) -> Row:
    """``load``: the last load of an attached group. ``tokens_per_s`` and ``hit_rate`` cover the
    last seconds; ``hit_rate`` is ``None`` if they had no prompt."""
    load = load or pb.Load()
    description = client.description if client.is_attached else None
    state = "ready" if is_routed_to else "draining" if client.is_attached else "lost"
    return {
        "group": name,
        "model": model,
        "address": client.address,
        "state": state,
        "why": "" if client.is_attached else client.last_error[:_MAX_CHARS],
        "ranks": description.tensor_parallel_size if description else 0,
        "tiers": description.num_tiers if description else 0,
        "block_size": description.block_size if description else 0,
        "max_running": description.max_num_seqs if description else 0,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "prefill": load.num_pending_prefill_tokens,
        "held": load.num_held_blocks,
        "cached": load.num_cached_blocks,
        "free": load.num_free_blocks,
        "host": load.num_host_tokens,
        "disk": load.num_disk_tokens,
        "peer": load.num_peer_tokens,
        "tps": round(tokens_per_s, 1),
        "hit": hit_rate if hit_rate is None else round(hit_rate, 4),
    }


def decision_row(each: Explanation) -> Row:
    decision = each.decision
    return {
        "id": each.request_id,
        "client_id": each.client_id,
        "tenant": each.tenant,
        "attempt": each.attempt,
        "at": round(each.decided_at_s, 3),
        "group": decision.group,
        "reason": decision.reason,
        "candidates": len(decision.groups),
        "tokens": decision.num_prompt_tokens,
        "expected": decision.predicted_cached_tokens,
        "cached": each.num_cached_tokens,
        "forecast": _rounded(decision.forecast_s),
        "waited": _rounded(each.waited_s),
        "outcome": each.outcome,
    }


def call_row(call: Timeline) -> Row:
    """An ended call, with the attempts of the completion that ended last. All times but ``at`` are
    in seconds since the call's arrival."""

    def since(time_s: float | None) -> float | None:
        return _rounded(None if time_s is None else time_s - call.arrival_s)

    assert call.ended_s is not None
    longest = max(call.completions, key=lambda each: each.ended_s or 0.0, default=None)
    attempts = longest.attempts[-MAX_ATTEMPTS:] if longest is not None else []
    return {
        "id": call.request_id,
        "client_id": call.client_id,
        "tenant": call.tenant,
        "at": round(call.wall_s(call.ended_s), 3),
        "prepared": since(call.prepared_s),
        "admitted": since(call.admitted_s),
        "total": since(call.ended_s),
        "completions": len(call.completions),
        "tokens": call.num_prompt_tokens,
        "cached": call.num_cached_tokens,
        "output": call.num_output_tokens,
        "outcome": ("+".join(call.outcomes) or call.error or call.status)[:_MAX_CHARS],
        "attempts": [
            {
                "group": each.group,
                "sent": since(each.routed_s),
                "first": since(each.begun_s),
                "end": since(each.ended_s),
                "outcome": each.outcome[:_MAX_CHARS],
            }
            for each in attempts
        ],
    }


def prefix_row(each: HotPrefix, *, model: str, block_size: int) -> Row:
    return {
        "name": each.name[:_NAME_BYTES].hex(),
        "parent": each.parent[:_NAME_BYTES].hex() if each.parent is not None else None,
        "model": model,
        "tokens": each.num_blocks * block_size,
        "hits": each.num_hits,
        "holders": list(each.holders),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)


def newest_first(rows: Sequence[Explanation], limit: int) -> list[Row]:
    """The newest ``limit`` decisions of several tables."""
    ordered = sorted(rows, key=lambda each: each.decided_at_s, reverse=True)
    return [decision_row(each) for each in ordered[:limit]]
