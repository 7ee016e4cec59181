"""``quire admin``: lists a cluster's groups, drains one, and returns it to service."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cluster.cli.columns import table, terminal_width
from quire.cluster.cli.help import DefaultsFormatter, Parser, add_server_flags, server_of

if TYPE_CHECKING:
    from quire.v1 import admin_pb2 as pb

_TIMEOUT_S = 30.0
_KEY = "If the server needs API keys, an operator's key is read from QUIRE_API_KEY."


def add_flags(parser: Parser) -> None:
    parser.description = f"See its commands. {_KEY}"
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, help_text in (
        ("list", "show the groups, their state and load"),
        (
            "drain",
            "send no new requests to a group, and wait until its running requests have ended",
        ),
        ("undrain", "send requests to a drained group again"),
    ):
        action = actions.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}. {_KEY}",
            formatter_class=DefaultsFormatter,
        )
        if name != "list":
            action.add_argument("group", help="the group's id, as `quire admin list` shows it")
        if name == "drain":
            action.add_argument(
                "--no-wait", action="store_true", help="return as soon as the drain has begun"
            )
        add_server_flags(action)
        action.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import grpc

    from quire.cluster.cli.server import print_rpc_error
    from quire.v1 import admin_pb2 as pb
    from quire.v1.admin_pb2_grpc import AdminStub

    server = server_of(arguments)
    metadata = server.metadata()
    with server.channel() as channel:
        admin = AdminStub(channel)
        try:
            if arguments.action == "list":
                listed = admin.ListGroups(
                    pb.ListGroupsRequest(), metadata=metadata, timeout=_TIMEOUT_S
                )
                print(overview(listed.groups))
            elif arguments.action == "undrain":
                undrain = pb.UndrainRequest(group=arguments.group)
                admin.Undrain(undrain, metadata=metadata, timeout=_TIMEOUT_S)
                print(f"{arguments.group} takes requests again")
            else:
                call = admin.Drain(pb.DrainRequest(group=arguments.group), metadata=metadata)
                for progress in call:
                    print(f"{arguments.group} drains: {progress.num_requests} requests", flush=True)
                    if arguments.no_wait:
                        call.cancel()
                        break
        except grpc.RpcError as error:
            print_rpc_error(server, error)
            return 1
    return 0


def overview(groups: "Sequence[pb.Group]") -> str:
    """One line for each group."""
    head = ("group", "address", "state", "model", "requests", "running", "waiting", "free blocks")
    rows = [head, *map(_line, groups)]
    return table(rows, width=terminal_width()) if groups else "No group is known."


def _line(group: "pb.Group") -> tuple[str, ...]:
    state = group.State.Name(group.state).lower()
    if group.trouble:
        return ("-", group.address, f"{state}: {group.trouble}", *[""] * 5)
    return (
        group.id,
        group.address,
        state,
        group.model,
        f"{group.num_requests:,}",
        f"{group.num_running:,}",
        f"{group.num_waiting:,}",
        f"{group.num_free_blocks + group.num_cached_blocks:,} of {group.num_blocks:,}",
    )
