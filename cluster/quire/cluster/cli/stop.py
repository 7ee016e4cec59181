"""``quire stop``: stops one application of a Ray cluster, and no other.

It is needed if no ``quire serve`` runs: the application was deployed from a file, or its ``quire
serve`` was killed.
"""

import argparse

from quire.cluster.cli.help import RAY_ADDRESS_HELP, Parser
from quire.cluster.config import ClusterConfig


def add_flags(parser: Parser) -> None:
    parser.description = "Drains and stops an application of a running Ray cluster, and no other."
    parser.add_argument("name", help="the application's name, as `quire serve` prints it")
    parser.add_argument("--ray-address", default="auto", help=RAY_ADDRESS_HELP)
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        default=ClusterConfig.drain_timeout_s,
        help="the application's own --drain-timeout-s; how long to wait for the drain",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.local import found_address, ray_session
    from quire.cluster.deploy.names import check_known
    from quire.cluster.deploy.stop import stop_app

    with ray_session(address=found_address(arguments.ray_address)) as session:
        check_known(arguments.name)
        print(f"Draining {arguments.name} …", flush=True)
        stop_app(arguments.name, session, drain_timeout_s=arguments.drain_timeout_s)
    print("Stopped.")
    return 0
