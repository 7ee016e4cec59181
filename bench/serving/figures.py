"""A run's results: its requests as rows, and figures."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from bench.serving.load import Stream

WARM_UP = 0.2
"""Share of the requests, the first ones sent, that meet empty caches and are not counted."""

Row = dict[str, Any]


def rows_of(streams: Sequence[Stream]) -> list[Row]:
    """One for each request that was sent, in the order of sending."""
    sent = sorted((s for s in streams if s.sent_s), key=lambda stream: stream.sent_s)
    return [
        {
            "name": stream.request.name,
            "at_s": round(stream.sent_s - sent[0].sent_s, 4),
            "ttft_s": None if stream.ttft_s is None else round(stream.ttft_s, 5),
            "tpot_s": None if stream.tpot_s is None else round(stream.tpot_s, 6),
            "end_s": round(stream.ended_s - sent[0].sent_s, 4),
            "prompt": len(stream.request.token_ids),
            "cached": stream.num_cached_tokens,
            "predicted": stream.num_predicted_tokens,
            "output": len(stream.tokens),
            "group": stream.group,
            "tokens": hashlib.sha256(json.dumps(stream.tokens).encode()).hexdigest()[:12],
            "error": stream.error,
        }
        for stream in sent
    ]


def figures(rows: Sequence[Row], *, num_groups: int) -> dict[str, float]:
    """Seconds, shares and rates; of the requests behind the warm-up, but for the failures."""
    counted = [row for row in rows[int(WARM_UP * len(rows)) :] if row["error"] is None]
    if not counted:
        return {"num_requests": len(rows), "num_failed": len(rows)}
    ttft = np.array([row["ttft_s"] for row in counted])
    tpot = np.array([row["tpot_s"] for row in counted if row["tpot_s"] is not None])
    prompt, cached = (sum(row[name] for row in counted) for name in ("prompt", "cached"))
    wrong = sum(abs(row["predicted"] - row["cached"]) for row in counted)
    begin_s, end_s = counted[0]["at_s"], max(row["end_s"] for row in counted)
    return {
        "num_requests": len(rows),
        "num_failed": sum(row["error"] is not None for row in rows),
        "hit_rate": cached / prompt,
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p90_s": float(np.quantile(ttft, 0.9)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "tpot_mean_s": float(tpot.mean()) if len(tpot) else 0.0,
        "output_tokens_per_s": sum(row["output"] for row in counted) / (end_s - begin_s),
        "requests_per_s": len(counted) / (end_s - begin_s),
        "balance": _balance(counted, num_groups=num_groups),
        "prediction_error": wrong / prompt,
        "duration_s": max(row["end_s"] for row in rows),
    }


def num_unlike(runs: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """Number of requests that several runs answered, and of those with unequal answers."""
    answers: dict[str, Counter[str]] = {}
    for rows in runs:
        for row in rows:
            if row["error"] is None:
                answers.setdefault(row["name"], Counter())[row["tokens"]] += 1
    several = [counts for counts in answers.values() if counts.total() > 1]
    return len(several), sum(len(counts) > 1 for counts in several)


def _balance(rows: Sequence[Row], *, num_groups: int) -> float:
    """The most prompt tokens that a group computed, over the mean; 0 where groups are unknown."""
    computed: Counter[str] = Counter()
    for row in rows:
        computed[row["group"]] += row["prompt"] - row["cached"]
    if "" in computed or not computed.total():
        return 0.0
    return max(computed.values()) * num_groups / computed.total()
