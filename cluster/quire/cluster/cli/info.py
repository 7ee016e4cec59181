"""``quire version``, ``quire help`` and ``quire completion``."""

import argparse
import json
import platform
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version

from quire import __version__
from quire.cluster.cli.commands import command_line
from quire.cluster.cli.help import Parser
from quire.worker.request.errors import ConfigError

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "llguidance",
    "numpy",
    "ray",
    "grpcio",
)
_SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_version_flags(parser: Parser) -> None:
    parser.description = "Shows the versions of Quire and of its main dependencies."
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.set_defaults(run=lambda arguments: _version(as_json=arguments.json))


def add_help_flags(parser: Parser) -> None:
    parser.description = "Shows the help of a command."
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="such as serve, or model add")
    parser.set_defaults(run=lambda arguments: _help(command_line(), arguments.command))


def add_completion_flags(parser: Parser) -> None:
    parser.description = (
        "Prints a script that makes a shell complete commands and flags. For bash: "
        'add eval "$(quire completion bash)" to ~/.bashrc. For zsh: the output is a file _quire '
        "in a folder of $fpath."
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.set_defaults(run=lambda arguments: _completion(command_line(), arguments.shell))


def versions() -> dict[str, str]:
    """The versions of Quire, Python and the installed packages that Quire uses."""
    found = {"quire": __version__, "python": platform.python_version()}
    found |= {name: each for name in _PACKAGES if (each := _of(name))}
    return found | {"platform": platform.platform()}


def _of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _version(*, as_json: bool) -> int:
    found = versions()
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:12} {each}" for name, each in found.items()))
    return 0


def _help(parser: argparse.ArgumentParser, command: list[str]) -> int:
    for name in command:
        parsers = next(
            (
                action.choices
                for action in parser._actions
                if isinstance(action, argparse._SubParsersAction)
            ),
            {},
        )
        if name not in parsers:
            near = get_close_matches(name, parsers, n=1)
            question = f"; is {near[0]} meant?" if near else ""
            known = ", ".join(parsers) or "none"
            raise ConfigError(f"{' '.join(command)!r} is no command; there are: {known}{question}")
        parser = parsers[name]
    parser.print_help()
    return 0


def _completion(parser: argparse.ArgumentParser, shell: str) -> int:
    import shtab

    print(shtab.complete(parser, shell=shell))
    return 0
