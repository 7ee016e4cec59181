"""``quire explain``: asks a gateway why requests were routed as they were, and prints a table."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quire.cluster.cli.columns import paragraph, table, table_rows, terminal_width
from quire.cluster.cli.help import Parser, add_server_flags, server_of

if TYPE_CHECKING:
    from quire.v1 import inference_pb2 as pb

_DEFAULT_LIMIT = 20
_HEAD = ("when", "request", "group", "why", "prompt", "cached", "first token", "outcome")


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Explains why a request was routed to its replica group, or shows one line for "
        "each of the latest requests. Each gateway remembers the latest that it routed, and "
        "all are asked. If the server needs an API key, it is read from QUIRE_API_KEY; it shows "
        "its tenant's requests, and an operator's key shows all requests."
    )
    parser.add_argument(
        "request_id",
        nargs="?",
        help="id of an answer or of a completion, or the X-Request-Id sent with the request",
    )
    parser.add_argument(
        "--limit",
        type=int,
        help=f"how many of the latest requests to list; {_DEFAULT_LIMIT} if absent",
    )
    add_server_flags(parser)
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    import grpc

    from quire.cluster.cli.server import print_rpc_error
    from quire.v1 import inference_pb2 as pb
    from quire.v1.inference_pb2_grpc import InferenceStub
    from quire.worker.request.errors import ConfigError

    limit = arguments.limit
    if limit is not None and not 1 <= limit < 2**32:
        raise ConfigError(f"limit={limit}: must be 1 or more")
    server = server_of(arguments)
    request = pb.ExplainRoutingRequest(request_id=arguments.request_id or "", limit=limit or 0)
    with server.channel() as channel:
        try:
            answer = InferenceStub(channel).ExplainRouting(
                request, metadata=server.metadata(), timeout=30
            )
        except grpc.RpcError as error:
            print_rpc_error(server, error)
            return 1
    if request.request_id:
        pages = (detailed(each, width=terminal_width()) for each in answer.decisions)
        print("\n\n".join(pages))
    else:
        print(overview(answer.decisions, width=terminal_width()))
    if answer.incomplete:
        print(f"quire: there may be more: {answer.incomplete}", file=sys.stderr)
    return 0


def overview(decisions: "Sequence[pb.RoutingDecision]", *, width: int | None = None) -> str:
    """One line for each decision. If it is wider than ``width``, the request's id and the outcome
    get a line of their own, and the id is not cut: it is needed to ask for details."""
    if not decisions:
        return "No request was routed yet that this key may see, or no decisions are kept."
    rows = [_HEAD, *map(_line, decisions)]
    lines = table_rows(rows)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    lines = table_rows([(when, *rest) for when, _, *rest, _ in rows], width=width)
    ends = [paragraph(f"{name}  {end}", width=width, indent="  ") for _, name, *_, end in rows]
    return "\n".join(each for pair in zip(lines, ends, strict=True) for each in pair)


def detailed(decision: "pb.RoutingDecision", *, width: int | None = None) -> str:
    """One decision with all its candidates and its outcome. ``width`` limits its table."""
    routing = decision.routing
    pressure = f", pressure {decision.pressure:.2f}" if decision.HasField("pressure") else ""
    known_as = f" ({decision.client_id})" if decision.client_id else ""
    known_as += f" of {decision.tenant}" if decision.tenant else ""
    head = ("", "group", "cost", "cached", "to compute", "queued", "sequences", "forecast")
    # Nearly equal costs count as a tie, so the chosen one need not be the lowest.
    candidates = sorted(
        routing.candidates, key=lambda each: (each.group != routing.group, each.cost)
    )
    rows = [head, *(_candidate(each, chosen=routing.group) for each in candidates)]
    if any(each.num_fetched_tokens for each in candidates):
        nums = [f"{each.num_fetched_tokens:,}" for each in candidates]
        rows = [
            (*row[:4], cell, *row[4:]) for row, cell in zip(rows, ("to fetch", *nums), strict=True)
        ]
    if any(each.HasField("adapter_cost") for each in candidates):
        costs = [f"{each.adapter_cost:,.0f}" for each in candidates]
        rows = [(*row, cell) for row, cell in zip(rows, ("for adapter", *costs), strict=True)]
    return "\n".join(
        (
            f"{decision.request_id}{known_as}, attempt {decision.attempt}, "
            f"{_when(decision)}, {decision.num_prompt_tokens:,} prompt tokens",
            f"went to {routing.group}: {routing.reason} (policy {decision.policy}{pressure})",
            f"cached tokens, predicted / found: {_cached(decision)}",
            *_fetched(decision),
            f"time to first token, forecast / real: {_first_token(decision)}",
            f"outcome: {decision.outcome or 'under way'}",
            "",
            table(rows, width=width),
        )
    )


def _candidate(candidate: "pb.RoutingCandidate", *, chosen: str) -> tuple[str, ...]:
    return (
        "->" if candidate.group == chosen else "",
        candidate.group,
        f"{candidate.cost:,.0f}" if candidate.HasField("cost") else "-",
        f"{candidate.num_cached_tokens:,}",
        f"{candidate.num_prefill_tokens:,}",
        f"{candidate.num_queued_tokens:,}" if candidate.HasField("num_queued_tokens") else "-",
        f"{candidate.num_sequences:,}" if candidate.HasField("num_sequences") else "-",
        _seconds(candidate.forecast_s if candidate.HasField("forecast_s") else None),
    )


def _line(decision: "pb.RoutingDecision") -> tuple[str, ...]:
    attempt = f" #{decision.attempt}" if decision.attempt > 1 else ""
    return (
        _when(decision),
        decision.request_id + attempt,
        decision.routing.group,
        decision.routing.reason,
        f"{decision.num_prompt_tokens:,}",
        _cached(decision),
        _first_token(decision),
        decision.outcome or "under way",
    )


def _when(decision: "pb.RoutingDecision") -> str:
    return f"{datetime.fromtimestamp(decision.decided_at_s, UTC):%H:%M:%S.%f}"[:-3] + "Z"


def _cached(decision: "pb.RoutingDecision") -> str:
    found = f"{decision.num_cached_tokens:,}" if decision.HasField("num_cached_tokens") else "-"
    return f"{decision.routing.predicted_cached_tokens:,} / {found}"


def _fetched(decision: "pb.RoutingDecision") -> list[str]:
    """Cached tokens that were fetched from outside the KV cache; no lines if there were none."""
    routing, found = decision.routing, decision.fetched
    lines = []
    if routing.num_fetched_tokens:
        of = f", from {routing.source}" if routing.source else ""
        forecast = _seconds(routing.fetch_s if routing.HasField("fetch_s") else None)
        lines.append(f"of these to fetch: {routing.num_fetched_tokens:,}{of}, forecast {forecast}")
    if decision.HasField("fetched"):
        why = f"; from its source it got no more: {found.error}" if found.error else ""
        lines.append(
            f"of these fetched: {found.num_host_tokens:,} from host memory, "
            f"{found.num_disk_tokens:,} from disk, {found.num_peer_tokens:,} from another group, "
            f"waited {_seconds(found.wait_s)}{why}"
        )
    return lines


def _first_token(decision: "pb.RoutingDecision") -> str:
    routing = decision.routing
    forecast = _seconds(routing.forecast_s if routing.HasField("forecast_s") else None)
    return f"{forecast} / {_seconds(decision.waited_s if decision.HasField('waited_s') else None)}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
