"""Every command of ``quire``. A command's module is imported when the command is named.

A new command is a line in `COMMANDS` and the function that the line names: it adds the command's
flags to its parser and sets ``run``, a function of the parsed arguments that returns the exit
status.
"""

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import NamedTuple

from quire import __version__
from quire.cluster.cli.help import DefaultsFormatter, Parser


class Command(NamedTuple):
    help: str
    """One line of ``quire --help``."""
    flags: str
    """``module:function``; the function takes the command's `Parser`."""


_CLI, _FEATURES = "quire.cluster.cli", "quire.cluster.features"
_TOOLS = "quire.cluster.tools"
COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "serve a model over gRPC and the OpenAI HTTP API until Ctrl-C",
        f"{_CLI}.serve:add_flags",
    ),
    "demo": Command(
        "start a cluster here, ask it a few questions, show timings and reuse, stop it",
        f"{_TOOLS}.demo.command:add_flags",
    ),
    "upgrade": Command(
        "replace the groups and gateways of a running application, with new settings",
        f"{_CLI}.upgrade:add_flags",
    ),
    "model": Command(
        "list, add, remove or replace the models of a cluster that serves",
        f"{_CLI}.model:add_flags",
    ),
    "stop": Command("drain and stop an application of a Ray cluster", f"{_CLI}.stop:add_flags"),
    "status": Command(
        "show which applications run on a Ray cluster, and whether they are complete",
        f"{_CLI}.status:add_flags",
    ),
    "top": Command(
        "show what a running cluster's groups do, every few seconds", f"{_TOOLS}.top:add_flags"
    ),
    "logs": Command("show the logs of a cluster on this machine", f"{_TOOLS}.logs:add_flags"),
    "generate": Command(
        "send a prompt to a running server and print the text as it arrives",
        f"{_TOOLS}.generate:add_flags",
    ),
    "chat": Command("talk to a running server", f"{_TOOLS}.chat:add_flags"),
    "explain": Command(
        "explain to which replica groups requests were routed",
        f"{_FEATURES}.explain.command:add_flags",
    ),
    "admin": Command(
        "list the replica groups, drain one, or end its drain", f"{_CLI}.admin:add_flags"
    ),
    "adapter": Command(
        "list the LoRA adapters, load one, or unload it", f"{_FEATURES}.adapters.command:add_flags"
    ),
    "keys": Command(
        "make, list and revoke the API keys of a keys file",
        f"{_FEATURES}.tenants.command:add_flags",
    ),
    "doctor": Command(
        "check this machine: packages, GPU, compiler, memory, disk, ports, a model's files",
        f"{_TOOLS}.doctor:add_flags",
    ),
    "run-batch": Command(
        "answer a file of requests in OpenAI's batch format",
        f"{_TOOLS}.run_batch.command:add_flags",
    ),
    "bench": Command(
        "measure any server, or prefix caching, block sizes and tiers of the cache",
        f"{_TOOLS}.bench.command:add_flags",
    ),
    "simulate": Command(
        "replay a request trace against simulated groups, to compare policies and sizes",
        f"{_TOOLS}.simulate.command:add_flags",
    ),
    "version": Command(
        "show the versions of Quire and of its main dependencies", f"{_CLI}.info:add_version_flags"
    ),
    "help": Command("show the help of a command", f"{_CLI}.info:add_help_flags"),
    "completion": Command(
        "print a script for shell completion of commands and flags",
        f"{_CLI}.info:add_completion_flags",
    ),
}
"""In the order of ``quire --help``."""


def command_line(names: Collection[str] = COMMANDS.keys()) -> Parser:
    """The parser of the command line. Only the commands among ``names`` have their flags; the
    modules of the others are not imported."""
    parser = Parser(
        prog="quire", description="Serve a language model on a Ray cluster, or ask one."
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.help, formatter_class=DefaultsFormatter)
        if name in names:
            module, _, function = command.flags.partition(":")
            getattr(import_module(module), function)(of_command)
    return parser
