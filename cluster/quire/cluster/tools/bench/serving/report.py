"""A load's result: a table for the terminal and a JSON file."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.cluster.tools.bench.serving.config import ServeBench
from quire.cluster.tools.bench.serving.load import Load
from quire.worker.request.errors import ConfigError

_LATE_MS = 10.0
"""If the client is later than this, the report notes it."""
_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token, after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "held back by the client",
}


def table(bench: ServeBench, load: Load, result: Mapping[str, Any]) -> str:
    """The result as a text table."""
    rows: list[tuple[str, str]] = [
        ("requests completed", f"{result['completed']:,}"),
        ("requests failed", f"{result['failed']:,}"),
        ("duration (s)", f"{result['duration']:,.2f}"),
        ("input tokens", f"{result['total_input_tokens']:,}"),
        ("output tokens", f"{result['total_output_tokens']:,}"),
        ("requests/s", f"{result['request_throughput']:,.2f}"),
    ]
    if result["request_goodput"] is not None:
        objectives = ", ".join(f"{name} {most:g} ms" for name, most in bench.goodput.items())
        rows.append((f"goodput/s ({objectives})", f"{result['request_goodput']:,.2f}"))
    rows += [
        ("output tokens/s", f"{result['output_throughput']:,.2f}"),
        ("all tokens/s", f"{result['total_token_throughput']:,.2f}"),
        ("peak output tokens/s", f"{result['max_output_tokens_per_s']:,.0f}"),
        ("peak requests at once", f"{result['max_concurrent_requests']:,}"),
    ]
    if result["cached_token_rate"] is not None:
        cached = f"{result['total_cached_tokens']:,} ({result['cached_token_rate']:.1%})"
        rows.append(("input tokens cached", cached))
    rows.append(("client's loop late, p99 (ms)", f"{result['p99_client_lag_ms']:,.2f}"))
    rows.append(("requests sent late, p99 (ms)", f"{result['p99_client_late_ms']:,.2f}"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += ["", *_spreads(bench, result)]
    if notes := _notes(load, result):
        lines += ["", *notes]
    return "\n".join(lines)


def make_folder(path: Path) -> None:
    """Creates the folder.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give another --result-dir") from None


def header(
    bench: ServeBench, *, model: str, tokenizer: str | None, num_prompts: int, now: datetime
) -> dict[str, Any]:
    """The first fields of a result: how it was measured."""
    kind = "openai-chat" if bench.target.is_chat else "openai"
    return {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": kind,
        "backend": kind,
        "label": bench.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": num_prompts,
        **bench.metadata,
        "request_rate": _rate(bench),
        "burstiness": bench.traffic.burstiness,
        "max_concurrency": bench.traffic.max_concurrency,
    }


def file_name(bench: ServeBench, *, model: str, now: datetime) -> str:
    """The default name of a result file."""
    kind = bench.label or ("openai-chat" if bench.target.is_chat else "openai")
    limit = bench.traffic.max_concurrency
    name = (
        f"{kind}-{_rate(bench)}qps{'' if limit is None else f'-concurrency{limit}'}-"
        f"{model.rsplit('/', 1)[-1]}-{now:%Y%m%d-%H%M%S}.json"
    )
    return name.replace("/", "-")


def _rate(bench: ServeBench) -> float | str:
    """The request rate as a JSON value."""
    rate = bench.traffic.request_rate
    if rate is None:
        return "trace"
    return "inf" if rate == float("inf") else rate


def _spreads(bench: ServeBench, result: Mapping[str, Any]) -> list[str]:
    points = ["mean", "median", *(f"p{percentile:g}" for percentile in bench.percentiles)]
    rows = [["milliseconds", *points]]
    for name in bench.metrics:
        figures = [f"{result[f'{point}_{name}_ms']:,.2f}" for point in points]
        rows.append([f"{name.upper()}: {_TITLES[name]}", *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _notes(load: Load, result: Mapping[str, Any]) -> list[str]:
    notes = []
    examples = {a.failure.kind: str(a.failure) for a in reversed(load.answers) if a.failure}
    for kind, number in result["errors_by_kind"].items():
        notes.append(f"failed, {kind}: {number:,} requests, such as: {examples[kind]}")
    if result["chunk_tokens_counted_by"] != "usage" and result["completed"]:
        notes.append(
            "the server does not tell how many tokens a chunk has: each counts as one in ITL"
        )
    if any(a.is_complete and a.num_output is None for a in load.answers):
        notes.append("the server tells no usage: output tokens are chunks, input tokens unknown")
    if (lag_ms := result["p99_client_lag_ms"]) > _LATE_MS:
        notes.append(
            f"the client was late by {lag_ms:,.1f} ms (p99): its figures are not the server's. "
            "Give it a core of its own, or share the load among several"
        )
    if (late_ms := result["p99_client_late_ms"]) > _LATE_MS and any(
        a.due_s > load.begin_s for a in load.answers
    ):
        notes.append(
            f"the client sent requests late by {late_ms:,.1f} ms (p99): they did not come as asked"
        )
    return notes
