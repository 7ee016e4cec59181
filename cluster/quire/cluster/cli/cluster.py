"""The flags of the commands that start a cluster or a model, and the configuration from them."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cluster.cli.flags import MODEL_HELP, add_settings, check_autoscaling, given_settings
from quire.cluster.cli.help import finite
from quire.cluster.cli.lora import lora_modules
from quire.cluster.config import ClusterConfig, ModelConfig


def add_cluster_flags(
    parser: argparse.ArgumentParser,
    *,
    defaults: Mapping[str, Any] | None = None,
    ray_address_help: str = "a running Ray cluster ('auto' finds it); if absent, one is started",
) -> None:
    """Adds the cluster flags to a command, which may have ``defaults`` of its own: settings as in a
    file."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="*",
        type=Path,
        help=f"{MODEL_HELP}; several models are served at the same address, each by its own groups "
        "and all with the settings given here",
    )
    add = parser.add_argument
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients; ORG/NAME or the directory's name if absent. Repeat it "
        "for further names of one model, or to name several models in their order",
    )
    add(
        "--name",
        help="name of the application, unique on its Ray cluster; derived from the model's if "
        "absent",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings of the cluster and of each model, in YAML; flags override them",
    )
    add("--ray-address", help=ray_address_help)
    add_settings(parser, ClusterConfig, defaults=defaults)
    add_group = {group.title: group for group in parser._action_groups}
    add_group["network"].add_argument(
        "--api-key",
        dest="api_keys",
        nargs="+",
        metavar="KEY",
        help="API keys, of which clients must send one, instead of a file; other users of this "
        "machine can see them in its list of processes",
    )
    _add_lora_modules(parser)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of ``quire serve``."""
    add_cluster_flags(parser)
    parser.add_argument(
        "--status-interval-s",
        type=finite,
        metavar="S",
        help="how often to print the load; 0 never. If absent, every 2 s in one line of a "
        "terminal, elsewhere every 10 s in which something ran",
    )
    parser.add_argument(
        "--print-config",
        nargs="?",
        const="given",
        choices=("given", "all"),
        metavar="all",
        help="print the settings as a file for --config, each with its source, and exit; "
        "--print-config=all includes the defaults",
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a single model."""
    add_settings(parser, ModelConfig)
    _add_lora_modules(parser)


def _add_lora_modules(parser: argparse.ArgumentParser) -> None:
    groups = {group.title: group for group in parser._action_groups}
    groups["engine"].add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help="with --enable-lora: adapters to serve from the start, which clients name as their "
        'model; NAME=PATH@MODEL or {"name": …, "path": …, "base_model_name": …} is for one of '
        "several models; PATH is a directory or ORG/NAME of the Hugging Face hub",
    )


def cluster_config(arguments: argparse.Namespace) -> ClusterConfig:
    """The cluster's configuration from the flags of `add_cluster_flags`, the environment and the
    file. Raises ConfigError."""
    from quire.cluster.cli.sources import read_cluster

    return read_cluster(arguments).config


def model_config(arguments: argparse.Namespace) -> ModelConfig:
    """The configuration of one model, ``path``, from the flags of `add_model_flags`. Raises
    ConfigError."""
    from quire.cluster.settings import merged, model_from

    name, *aliases = arguments.served_model_name or [None]
    (modules,) = lora_modules(arguments.lora_modules or (), models=[""]).values()
    own = {"served_model_name": name, "aliases": aliases, "lora_modules": modules}
    given = given_settings(arguments, ModelConfig)
    check_autoscaling(given, given)
    return model_from(merged(given, {"engine": {"model": arguments.path}}, own))
