"""The timing of a call as clients receive it."""

from typing import Any

from quire.cluster.telemetry.timeline import Attempt, CompletionRecord, Timeline


def timing_of(call: Timeline, *, now_s: float) -> dict[str, Any]:
    """The timing of a call that may still be running. All times are in seconds from its arrival;
    ``None`` if not reached yet."""

    def since(time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - call.arrival_s, 6)

    def attempt(each: Attempt) -> dict[str, Any]:
        return {
            "group": each.group,
            "reason": each.reason,
            "sent_s": since(each.routed_s),
            "first_token_s": since(each.begun_s),
            "end_s": since(each.ended_s),
            "resumed_tokens": each.num_resumed_tokens,
            "cached_tokens": each.num_cached_tokens,
            "outcome": each.outcome,
        }

    def completion(each: CompletionRecord) -> dict[str, Any]:
        return {
            "index": each.index,
            "first_token_s": since(each.first_token_s),
            "end_s": since(each.ended_s),
            "attempts": [attempt(made) for made in each.attempts],
        }

    return {
        "prepared_s": since(call.prepared_s),
        "admitted_s": since(call.admitted_s),
        "first_token_s": since(call.first_token_s),
        "total_s": since(now_s if call.ended_s is None else call.ended_s),
        "completions": [completion(each) for each in call.completions],
    }


def server_timing(call: Timeline, *, now_s: float) -> str:
    """The timing as the value of the header ``Server-Timing``, in milliseconds."""
    marks = [("prepare", call.arrival_s), ("queue", call.prepared_s), ("ttft", call.admitted_s)]
    ends = [call.prepared_s, call.admitted_s, call.first_token_s]
    parts = [
        (name, end_s - begin_s)
        for (name, begin_s), end_s in zip(marks, ends, strict=True)
        if begin_s is not None and end_s is not None
    ]
    parts.append(("total", now_s - call.arrival_s))
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts)
