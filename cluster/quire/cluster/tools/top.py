"""``quire top``: shows the activity of a cluster's groups in a terminal, every few seconds."""

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from math import isinf
from typing import TYPE_CHECKING

from quire.cluster.cli.columns import paragraph, table, terminal_width
from quire.cluster.cli.help import (
    Parser,
    add_server_flags,
    finite,
    server_of,
)

if TYPE_CHECKING:
    from quire.v1 import admin_pb2 as pb

_TIMEOUT_S = 10.0
_CLEAR, _HOME = "\x1b[2J", "\x1b[H"
_ERASE_LINE, _ERASE_REST = "\x1b[K", "\x1b[J"
_HEAD = (
    *("group", "model", "state", "run", "wait", "to compute", "prompt/s", "cached"),
    *("output/s", "KV", "kept"),
)


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Show what a running cluster's groups do, every few seconds, until Ctrl-C. Where the "
        "server wants API keys, an operator's is read from QUIRE_API_KEY."
    )
    add_server_flags(parser)
    parser.add_argument(
        "--interval-s", type=_positive, default=2.0, help="seconds between two updates"
    )
    parser.add_argument(
        "--once", action="store_true", help="show one interval and exit, as in a pipe"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import grpc

    from quire.cluster.cli.server import print_rpc_error
    from quire.v1 import admin_pb2 as pb
    from quire.v1.admin_pb2_grpc import AdminStub

    server = server_of(arguments)
    with server.channel() as channel:
        admin, metadata = AdminStub(channel), server.metadata()

        def look() -> pb.ListGroupsResponse:
            return admin.ListGroups(pb.ListGroupsRequest(), metadata=metadata, timeout=_TIMEOUT_S)

        try:
            _show(look, arguments)
        except grpc.RpcError as error:
            print_rpc_error(server, error)
            return 1
    return 0


def _show(look: "Callable[[], pb.ListGroupsResponse]", arguments: argparse.Namespace) -> None:
    is_once = arguments.once or not sys.stdout.isatty()
    before, before_s = look(), time.monotonic()
    if not is_once:
        sys.stdout.write(_CLEAR)
    while True:
        time.sleep(arguments.interval_s)
        after, now_s = look(), time.monotonic()
        shown = frame(before, after, interval_s=now_s - before_s, width=terminal_width())
        if is_once:
            print(shown)
            return
        # More lines than the terminal has would scroll the first ones away.
        lines = shown.split("\n")[: shutil.get_terminal_size().lines - 1]
        sys.stdout.write(_HOME + "".join(f"{line}{_ERASE_LINE}\n" for line in lines) + _ERASE_REST)
        sys.stdout.flush()
        before, before_s = after, now_s


def frame(
    before: "pb.ListGroupsResponse",
    after: "pb.ListGroupsResponse",
    *,
    interval_s: float,
    width: int | None = None,
) -> str:
    """One screen in ``width`` columns: a summary line, times to the first token, and a row per
    group."""
    from quire.cluster.telemetry.rates import first_token_s, status_line

    half, most = (
        _within(first_token_s(before.gateway, after.gateway, share)) for share in (0.5, 0.99)
    )
    gateway = after.gateway
    rows = [_row(group, before, interval_s) for group in after.groups]
    here = (
        f"this gateway: {gateway.num_inflight:,} under way, {gateway.num_queued:,} queued, "
        f"first token p50 {half}, p99 {most}"
    )
    return "\n".join(
        [
            paragraph(status_line(before, after, interval_s=interval_s), width=width),
            paragraph(here, width=width),
            "",
            _table(rows, width) if rows else "no group is known",
        ]
    )


def _table(rows: list[tuple[str, ...]], width: int | None) -> str:
    """Shows the groups' models only if there are several: without them, it fits into 80 columns."""
    models = {row[1] for row in rows}
    shown = [_HEAD, *rows]
    shown = shown if len(models) > 1 else [(row[0], *row[2:]) for row in shown]
    return table(shown, width=width)


def _row(group: "pb.Group", before: "pb.ListGroupsResponse", interval_s: float) -> tuple[str, ...]:
    from quire.cluster.telemetry.rates import Rates

    state = group.State.Name(group.state).lower()
    if group.trouble:
        return (group.address, group.model, f"{state}: {group.trouble}", *[""] * 8)
    rates = Rates.between(before.groups, [group], interval_s=interval_s)
    return (
        group.id,
        group.model,
        state,
        f"{group.num_running:,}",
        f"{group.num_waiting:,}",
        f"{group.num_pending_prefill_tokens:,}",
        f"{rates.prompt_per_s:,.0f}",
        "-" if rates.hit_rate is None else f"{rates.hit_rate:.0%}",
        f"{rates.output_per_s:,.0f}",
        f"{rates.kv_use:.0%}",
        f"{group.num_cached_blocks / max(group.num_blocks, 1):.0%}",
    )


def _within(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "over 60 s" if isinf(seconds) else f"within {seconds:g} s"


def _positive(text: str) -> float:
    seconds = finite(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return seconds
