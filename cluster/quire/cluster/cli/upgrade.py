"""``quire upgrade``: replaces an application's groups and gateways without breaking clients'
streams.

It takes the flags of ``quire serve``. All of them apply: a flag that is left out gets its default,
and does not keep its former value.
"""

import argparse
from dataclasses import replace

from quire.cluster.cli.cluster import add_cluster_flags, cluster_config
from quire.cluster.cli.help import RAY_ADDRESS_HELP, SHORT_USAGE, Parser


def add_flags(parser: Parser) -> None:
    parser.usage = SHORT_USAGE
    parser.description = (
        "Replaces the groups and gateways of a running application one by one, with "
        "the settings given here; running requests continue. Flags that are left out return to "
        "their defaults: repeat those of `quire serve`."
    )
    add_cluster_flags(parser, ray_address_help=RAY_ADDRESS_HELP)
    parser.add_argument(
        "--start-first",
        action="store_true",
        help="start each new group before an old one stops, which takes room for one more",
    )
    parser.reads_environment = True
    parser.set_defaults(run=_run, ray_address="auto")


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.app import upgrade_app
    from quire.cluster.deploy.local import found_address, ray_session
    from quire.cluster.deploy.names import name_of_application
    from quire.cluster.deploy.progress import on_stdout

    config = replace(cluster_config(arguments), start_first=arguments.start_first)
    name = name_of_application(config.model_name, arguments.name)
    address = found_address(arguments.ray_address)
    with on_stdout() as progress, ray_session(address=address):
        endpoints = upgrade_app(config, name=name, progress=progress)
    print(f"Upgraded {name}: gRPC {endpoints.grpc}, HTTP {endpoints.http}")
    return 0
