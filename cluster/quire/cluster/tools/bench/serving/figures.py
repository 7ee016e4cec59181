"""Figures of a load, under the names that ``vllm bench serve`` uses.

    TTFT   from sending a request to its first chunk with a token
    TPOT   (latency - TTFT) / (tokens - 1), for each request of two tokens or more
    ITL    the gap before each token, over all requests
    E2EL   from sending a request to its last chunk: its latency

Failed requests count only in ``failed``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cluster.tools.bench.serving.answer import Answer
from quire.cluster.tools.bench.serving.load import Load


def figures(
    load: Load,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """The figures. Rates are per second; ``goodput``'s objectives are in milliseconds."""
    done = [answer for answer in load.answers if answer.is_complete]
    per_s = 1 / load.duration_s if load.duration_s > 0 else 0.0
    num_input = sum(answer.num_prompt or 0 for answer in done)
    num_output = sum(answer.num_tokens for answer in done)
    told = [answer for answer in done if answer.num_cached is not None]
    result: dict[str, Any] = {
        "duration": load.duration_s,
        "completed": len(done),
        "failed": len(load.answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) * per_s,
        "request_goodput": (
            sum(_is_good(answer, goodput) for answer in done) * per_s if goodput else None
        ),
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
        "max_output_tokens_per_s": _most_tokens(done),
        "max_concurrent_requests": _most_at_once(done),
    }
    values: dict[str, Sequence[float] | NDArray[np.float64]] = {
        "ttft": [answer.ttft_s for answer in done],
        "tpot": [tpot for answer in done if (tpot := _tpot_s(answer)) is not None],
        "itl": np.concatenate([np.zeros(0), *(answer.itls_s for answer in done)]),
        "e2el": [answer.latency_s for answer in done],
        "client_queue_time": [answer.queued_s for answer in done],
    }
    for name in metrics:
        result |= _spread(name, values[name], percentiles)
    return result | {
        # The names from here on are Quire's own.
        "total_cached_tokens": sum(answer.num_cached or 0 for answer in told) if told else None,
        "cached_token_rate": _share(
            sum(answer.num_cached or 0 for answer in told),
            sum(answer.num_prompt or 0 for answer in told),
        ),
        "chunk_tokens_counted_by": _counted_by(done),
        "errors_by_kind": dict(load.failures.most_common()),
        "p99_client_lag_ms": _percentile(load.lags_s, 99),
        "p99_client_late_ms": _percentile(load.late_s, 99),
    }


def details(load: Load) -> dict[str, list[Any]]:
    """Each field as a list, in the order of the requests; zeros for failed ones."""
    answers = load.answers
    return {
        "input_lens": [answer.num_prompt or 0 for answer in answers],
        "output_lens": [answer.num_tokens if answer.is_complete else 0 for answer in answers],
        "ttfts": [answer.ttft_s if answer.times else 0.0 for answer in answers],
        "itls": [answer.itls_s.tolist() if answer.times else [] for answer in answers],
        "latencies": [answer.latency_s if answer.ended_s else 0.0 for answer in answers],
        "start_times": [answer.sent_s for answer in answers],
        "queue_times": [answer.queued_s for answer in answers],
        "generated_texts": ["".join(answer.text) for answer in answers],
        "errors": [str(answer.failure or "") for answer in answers],
        "cached_lens": [answer.num_cached for answer in answers],
    }


def _tpot_s(answer: Answer) -> float | None:
    if answer.num_tokens < 2:
        return None
    return (answer.latency_s - answer.ttft_s) / (answer.num_tokens - 1)


def _is_good(answer: Answer, goodput: Mapping[str, float]) -> bool:
    taken_s = {"ttft": answer.ttft_s, "tpot": _tpot_s(answer) or 0.0, "e2el": answer.latency_s}
    return all(1000 * taken_s[name] <= most_ms for name, most_ms in goodput.items())


def _spread(
    name: str, values_s: Sequence[float] | NDArray[np.float64], percentiles: Sequence[float]
) -> dict[str, float]:
    values_ms = 1000 * np.array(values_s if len(values_s) else [0.0])
    return {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
        **{
            f"p{percentile:g}_{name}_ms": float(np.percentile(values_ms, percentile))
            for percentile in percentiles
        },
    }


def _percentile(values_s: Iterable[float], percentile: float) -> float:
    values = np.array(list(values_s) or [0.0])
    return float(1000 * np.percentile(values, percentile))


def _most_tokens(done: Sequence[Answer]) -> float:
    """Tokens in the busiest second; seconds count from the first request."""
    if not done:
        return 0.0
    times = np.concatenate([np.array(answer.times) for answer in done])
    counts = np.concatenate([np.array(answer.counts) for answer in done])
    begin_s = min(answer.sent_s for answer in done)
    return float(np.bincount((times - begin_s).astype(np.int64), weights=counts).max())


def _most_at_once(done: Sequence[Answer]) -> int:
    """Most requests running at the same moment. (vLLM counts those running in the same second.)"""
    changes = sorted([(a.sent_s, 1) for a in done] + [(a.ended_s, -1) for a in done])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)


def _counted_by(done: Sequence[Answer]) -> str:
    kinds = {answer.is_counted for answer in done}
    if kinds == {True}:
        return "usage"
    return "chunks" if kinds <= {False, None} else "usage and chunks"


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
