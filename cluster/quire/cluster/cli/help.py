"""What commands share: defaults in ``--help``, and the flags that say which server is asked."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cluster.client import Server


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults as one would type them, and none where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or action.const is True:
            return action.help
        if isinstance(default, (list, tuple)):
            shown = " ".join(map(str, default)).replace("%", "%%")
            return f"{action.help} (default: {shown})"
        return super()._get_help_string(action)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what `server_of` reads."""
    add = parser.add_argument
    add("--address", default="127.0.0.1:50051", help="of the gRPC server")
    add("--tls", action="store_true", help="the server has TLS, with a well-known authority")
    add("--tls-ca", type=Path, help="the server has TLS, with this authority (PEM)")


def server_of(arguments: argparse.Namespace) -> "Server":
    """The server that the flags name, with the API key of the environment."""
    from quire.cluster.client import Server

    return Server(
        address=arguments.address,
        tls=arguments.tls,
        tls_ca=arguments.tls_ca,
        api_key=os.environ.get("QUIRE_API_KEY"),
    )
