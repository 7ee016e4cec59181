"""``quire model``: changes the models of a running cluster."""

import argparse
from collections.abc import Callable
from pathlib import Path

from quire.cluster.cli.cluster import add_model_flags, model_config
from quire.cluster.cli.columns import table, terminal_width
from quire.cluster.cli.flags import MODEL_HELP, absolute
from quire.cluster.cli.help import RAY_ADDRESS_HELP, SHORT_USAGE, DefaultsFormatter, Parser


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Lists, adds, removes or replaces the models of a cluster that serves. Its "
        "gateways stay, and so do the streams of its other models."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    listed = actions.add_parser("list", help="show names, state, groups and path of each model")
    listed.set_defaults(run=_list)

    add = actions.add_parser(
        "add",
        usage=SHORT_USAGE,
        help="serve a further model",
        description="Starts the groups of a further model and serves it at gateways. Flags that "
        "are left out have their defaults.",
        formatter_class=DefaultsFormatter,
    )
    add.add_argument("path", metavar="MODEL", type=Path, help=MODEL_HELP)
    add.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients; ORG/NAME or the directory's name if absent. "
        "Repeat it for further names",
    )
    add_model_flags(add)
    add.set_defaults(run=_add)

    remove = actions.add_parser(
        "remove", help="stop serving a model, after its streams have finished"
    )
    remove.add_argument("model", metavar="NAME", help="name of the model for clients")
    remove.set_defaults(run=_remove)

    replace = actions.add_parser(
        "replace",
        help="serve new weights under a model's name",
        description="Starts groups with new weights and the model's settings, sends requests to "
        "them once they serve, lets streams finish on the old groups, and stops those.",
    )
    replace.add_argument("model", metavar="NAME", help="name of the model for clients")
    replace.add_argument("path", metavar="MODEL", type=Path, help=f"the new weights: {MODEL_HELP}")
    replace.set_defaults(run=_replace)

    for each in (listed, add, remove, replace):
        each.add_argument(
            "--name", required=True, help="name of the cluster, as `quire serve` prints it"
        )
        each.add_argument("--ray-address", default="auto", help=RAY_ADDRESS_HELP)


def _list(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.change import model_states
    from quire.cluster.deploy.local import found_address, ray_session

    with ray_session(address=found_address(arguments.ray_address)):
        states = model_states(arguments.name)
    rows = [("name", "aliases", "state", "groups", "path")]
    for each in states:
        state = f"{each.state}: {each.reason}" if each.reason else each.state
        aliases = ", ".join(each.aliases) or "-"
        rows.append((each.name, aliases, state, str(each.num_groups), each.path))
    print(table(rows, width=terminal_width()))
    return 0


def _add(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.change import add_model
    from quire.cluster.deploy.progress import Progress

    arguments.path = absolute(arguments.path)
    model = model_config(arguments)

    def change(progress: Progress) -> None:
        add_model(arguments.name, model, progress=progress)

    return _change(arguments, f"Adding {model.model_name}", "Added", change)


def _remove(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.change import remove_model
    from quire.cluster.deploy.progress import Progress

    def change(progress: Progress) -> None:
        remove_model(arguments.name, arguments.model, progress=progress)

    return _change(arguments, f"Removing {arguments.model}", "Removed", change)


def _replace(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.change import replace_model
    from quire.cluster.deploy.progress import Progress

    def change(progress: Progress) -> None:
        replace_model(arguments.name, arguments.model, absolute(arguments.path), progress=progress)

    return _change(arguments, f"Replacing {arguments.model}", "Replaced", change)


def _change(
    arguments: argparse.Namespace, what: str, done: str, change: Callable[..., None]
) -> int:
    from quire.cluster.deploy.local import found_address, ray_session
    from quire.cluster.deploy.progress import on_stdout

    with on_stdout() as progress, ray_session(address=found_address(arguments.ray_address)):
        progress.say(f"{what} …")
        change(progress)
    print(f"{done} after {progress.elapsed_s:.1f} s.")
    return 0
