"""The flags of ``quire demo``."""

import argparse

from quire.cluster.cli.cluster import add_cluster_flags, cluster_config
from quire.cluster.cli.help import SHORT_USAGE, Parser
from quire.cluster.deploy.kept_keys import kept_keys
from quire.cluster.deploy.progress import on_stdout
from quire.cluster.deploy.signals import ended_by_signal


def add_flags(parser: Parser) -> None:
    parser.usage = SHORT_USAGE
    parser.description = (
        "Starts a cluster on this machine with two replica groups of two ranks, asks "
        "questions that share a system prompt, shows what each cost, and stops it."
    )
    add_cluster_flags(
        parser,
        defaults={
            "num_groups": 2,
            "engine": {"tensor_parallel_size": 2},
            "grpc_port": 0,
            "http_port": 0,
        },
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with ended_by_signal(), kept_keys(arguments.api_keys), on_stdout() as progress:
        with progress.step("imports"):
            from quire.cluster.tools.demo.run import run_demo

        return run_demo(
            cluster_config(arguments),
            name=arguments.name,
            ray_address=arguments.ray_address,
            progress=progress,
        )
