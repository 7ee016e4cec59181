"""``quire serve``: serves a model until Ctrl-C."""

import argparse

from quire.cluster.cli.cluster import add_serve_flags
from quire.cluster.cli.help import SHORT_USAGE, Parser
from quire.cluster.cli.vllm_flags import translated
from quire.cluster.deploy.kept_keys import kept_keys
from quire.cluster.deploy.progress import on_stdout
from quire.cluster.deploy.signals import ended_by_signal


def add_flags(parser: Parser) -> None:
    parser.usage = SHORT_USAGE
    parser.description = "Serves a model over gRPC and the OpenAI HTTP API until Ctrl-C."
    add_serve_flags(parser)
    parser.spellings = translated
    parser.reads_environment = True
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.cli.sources import check_paths, read_cluster

    sources = read_cluster(arguments)
    if arguments.print_config is not None:
        from quire.cluster.cli.print_config import printed

        print(printed(sources, everything=arguments.print_config == "all"), end="")
        return 0
    check_paths(sources.config)
    # The imports alone take seconds.
    with ended_by_signal(), kept_keys(arguments.api_keys), on_stdout() as progress:
        with progress.step("imports"):
            from quire.cluster.deploy.app import serve_until_signal

        serve_until_signal(
            sources.config,
            name=arguments.name,
            ray_address=arguments.ray_address,
            status_every_s=arguments.status_interval_s,
            progress=progress,
        )
    return 0
