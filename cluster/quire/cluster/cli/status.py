"""``quire status``: the applications on a Ray cluster, and whether all their parts run."""

import argparse
import json
from typing import Any

from quire.cluster.cli.help import RAY_ADDRESS_HELP, Parser
from quire.worker.request.errors import ConfigError

_HEALTHY, _NOT_WHOLE, _NOTHING = 0, 1, 2


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Show which applications run on a Ray cluster, and whether they are complete. The exit "
        "status is 0 if all are, 1 if groups or gateways are missing, and 2 if nothing runs."
    )
    parser.add_argument("name", nargs="?", help="one application; all of them if absent")
    parser.add_argument("--ray-address", default="auto", help=RAY_ADDRESS_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.local import found_address, ray_session
    from quire.cluster.deploy.names import check_known
    from quire.cluster.deploy.overview import overview

    try:
        address = found_address(arguments.ray_address)
    except ConfigError as error:
        print(f"Nothing runs: {error}")
        return _NOTHING
    with ray_session(address=address):
        found = overview(arguments.name)
        if arguments.name is not None and not found:
            check_known(arguments.name)  # Raises with a list of the known ones.
        # Printed here, since disconnecting from Ray takes a while.
        if arguments.json:
            print(json.dumps(found, indent=2), flush=True)
        elif not found:
            told = "No application runs here: `quire serve --ray-address auto` starts one."
            print(told, flush=True)
        else:
            print("\n".join(map(_told, found)), flush=True)
    if not found:
        return _NOTHING
    return _HEALTHY if all(each["is_whole"] for each in found) else _NOT_WHOLE


def _told(each: dict[str, Any]) -> str:
    state = "whole" if each["is_whole"] else each["missing"] or each["state"]
    told = [
        (name, f"{parts['running']} of {parts['wanted']} run")
        for name, parts in each["deployments"].items()
    ]
    for model in each["models"]:
        groups = "1 group" if model["num_groups"] == 1 else f"{model['num_groups']} groups"
        reason = f": {model['reason']}" if model["reason"] else ""
        told.append((model["name"], f"{model['state']}, {groups}{reason}"))
    told += each["addresses"].items()
    width = max(12, *(len(name) for name, _ in told))
    return "\n".join(
        [f"{each['application']}: {state}", *(f"  {name:{width}} {what}" for name, what in told)]
    )
