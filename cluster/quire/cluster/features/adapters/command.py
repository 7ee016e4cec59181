"""``quire adapter``: lists, loads and unloads the LoRA adapters of a running cluster."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cluster.cli.columns import table, terminal_width
from quire.cluster.cli.flags import absolute
from quire.cluster.cli.help import DefaultsFormatter, Parser, add_server_flags, server_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.v1 import admin_pb2 as pb

_LIST_TIMEOUT_S, _LOAD_TIMEOUT_S = 30.0, 600.0
_KEY = "If the server needs API keys, an operator's key is read from QUIRE_API_KEY."
_HEAD = ("name", "model", "source", "digest")


def add_flags(parser: Parser) -> None:
    parser.description = f"See its commands. {_KEY}"
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, help_text in (
        ("list", "show the adapters that clients can name as their model"),
        ("load", "load an adapter under a name; an adapter with that name is replaced"),
        ("unload", "let no new request name it"),
    ):
        action = actions.add_parser(
            name,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}. {_KEY}",
            formatter_class=DefaultsFormatter,
        )
        if name != "list":
            action.add_argument("name", help="name of the adapter for clients")
        if name == "load":
            action.add_argument(
                "source",
                help="a directory on the gateway's node, or ORG/NAME[@REVISION] of the Hugging "
                "Face hub",
            )
            action.add_argument(
                "--model", default="", help="the adapter's model, if several take adapters"
            )
        add_server_flags(action)
        action.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import grpc

    from quire.cluster.cli.server import print_rpc_error
    from quire.v1 import admin_pb2 as pb
    from quire.v1.admin_pb2_grpc import AdminStub

    server = server_of(arguments)
    metadata, name = server.metadata(), getattr(arguments, "name", "")
    with server.channel() as channel:
        admin = AdminStub(channel)
        try:
            if arguments.action == "list":
                listed = admin.ListAdapters(
                    pb.ListAdaptersRequest(), metadata=metadata, timeout=_LIST_TIMEOUT_S
                )
                print(overview(listed.adapters))
                return 0
            if arguments.action == "load":
                asked = pb.LoadAdapterRequest(
                    name=name, source=str(absolute(Path(arguments.source))), model=arguments.model
                )
                loaded = admin.LoadAdapter(asked, metadata=metadata, timeout=_LOAD_TIMEOUT_S)
                told, incomplete = f"{name} is loaded: {loaded.adapter.digest}", loaded.incomplete
            else:
                gone = admin.UnloadAdapter(
                    pb.UnloadAdapterRequest(name=name), metadata=metadata, timeout=_LIST_TIMEOUT_S
                )
                told, incomplete = f"{name} is unloaded", gone.incomplete
        except grpc.RpcError as error:
            print_rpc_error(server, error)
            return 1
    print(f"{told}; {incomplete}, and will be told again" if incomplete else told)
    return 0


def overview(adapters: "Iterable[pb.Adapter]") -> str:
    """One line for each adapter."""
    lines = [(each.name, each.model, each.source, each.digest[:12]) for each in adapters]
    return table([_HEAD, *lines], width=terminal_width()) if lines else "No adapter is loaded."
