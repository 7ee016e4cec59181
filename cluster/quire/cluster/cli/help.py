"""Helpers of all commands: parsing and refusing flags, defaults in ``--help``, and the flags that
name a server."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.cluster.cli.environment import read_environment
from quire.worker.request.errors import ConfigError

if TYPE_CHECKING:
    from quire.cluster.cli.server import Server

_CLOSE = 0.8
"""How similar an unknown flag must be to a known one to be suggested: --num-group is, --tokenizer
and --block-size are not."""

Spellings = Callable[[Sequence[str], Sequence[str]], tuple[Sequence[str], Sequence[str]]]
"""Maps arguments and the known flags to new arguments and notes. Raises ConfigError."""

SHORT_USAGE = "%(prog)s [MODEL …] [flags]"
"""Usage line of commands whose list of flags would fill the first screen of ``--help``."""


RAY_ADDRESS_HELP = (
    "address of the Ray cluster; 'auto' is that of RAY_ADDRESS, of the newest `quire serve` here, "
    "or of the cluster to which this machine belongs"
)


class Parser(argparse.ArgumentParser):
    """Accepts flags only by their whole names: once a flag is added, a prefix could mean another
    flag or none. An error is one line, since the usage of ``serve`` alone fills a screen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.spellings: Spellings | None = None
        """Translates flags of other programs that are accepted, too."""
        self.reads_environment = False
        """Whether flags that are not given are read from the environment."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Each command refuses unknown arguments itself, since it knows the valid ones. A command
        with ``--config`` also records which flags were ``given``, on the command line or in the
        environment, and the ``variables`` of the latter."""
        args = self._attached(sys.argv[1:] if args is None else args)
        if self.spellings is not None:
            own = [flag for action in self._actions for flag in action.option_strings]
            try:
                args, notes = self.spellings(args, own)
            except ConfigError as error:
                self.error(str(error))
            for note in notes:
                print(f"{self.prog}: {note}", file=sys.stderr)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unrecognized(unknown))
        if any(action.dest == "config" for action in self._actions):
            known.given = self._given(args)
            known.flags = {
                action.dest.rpartition(".")[2]: action.option_strings[0]
                for action in self._actions
                if action.option_strings and action.option_strings[0].startswith("--")
            }
            known.variables = {}
            if self.reads_environment:
                self._take_environment(known)
        return known, unknown

    def _attached(self, args: Sequence[str]) -> list[str]:
        """``args`` with ``=`` and the default value after each flag whose value is optional and
        absent, so that the next argument is never taken for the value."""
        optional = {
            flag: action.const
            for action in self._actions
            if action.nargs == argparse.OPTIONAL and action.const is not None
            for flag in action.option_strings
        }
        place = list(args).index("--") if "--" in args else len(args)
        filled = [f"{each}={optional[each]}" if each in optional else each for each in args[:place]]
        return [*filled, *args[place:]]

    def _take_environment(self, known: argparse.Namespace) -> None:
        try:
            found = read_environment(self, os.environ, given=known.given, close=_CLOSE)
        except ConfigError as error:
            self.error(str(error))
        for note in found.notes:
            print(f"{self.prog}: {note}", file=sys.stderr)
        for name, value in found.values.items():
            setattr(known, name, value)
        known.given |= found.values.keys()
        known.variables = found.variables

    def _given(self, args: Sequence[str] | None) -> frozenset[str]:
        defaults = [(action, action.default) for action in self._actions]
        try:
            for action in self._actions:
                action.default = argparse.SUPPRESS
            return frozenset(vars(super().parse_known_args(args, argparse.Namespace())[0]))
        finally:
            for action, default in defaults:
                action.default = default

    def error(self, message: str) -> NoReturn:
        """Prints one line and ends the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` says what there is\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError if the value is not one of the choices; a similar choice is
        suggested."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if near := get_close_matches(str(value), map(str, action.choices or ()), n=1):
                error.message += f"; is {near[0]} meant?"
            raise

    def _unrecognized(self, given: Sequence[str]) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings]
        plain = {
            f"--{action.dest}": action for action in self._actions if not action.option_strings
        }
        for argument in given:
            if action := plain.get(argument.partition("=")[0]):
                name = action.metavar or action.dest
                return f"unrecognized arguments: {argument}; {name} is given without a flag"
        meant = [
            close
            for argument in given
            if argument.startswith("-")
            for close in get_close_matches(argument.partition("=")[0], flags, n=1, cutoff=_CLOSE)
        ]
        question = f" (is {' '.join(meant)} meant?)" if meant else ""
        return f"unrecognized arguments: {' '.join(given)}{question}"


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults as one would type them; flags without a default show none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if hasattr(action, "setting"):  # Read from source only where it is shown.
            from quire.cluster.cli.flags import help_of

            return help_of(action).replace("%", "%%")
        default = action.default
        if default is None or default == "" or action.const is True:
            return action.help
        if isinstance(default, (list, tuple)):
            shown = " ".join(map(str, default)).replace("%", "%%")
            return f"{action.help} (default: {shown})"
        return super()._get_help_string(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """``message`` with settings written as flags, such as ``--device cpu`` for ``device='cpu'``.
    ``flags`` has the flag of each setting."""

    def written(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if value is None and "_" not in name:
            return found[0]  # The word, not the setting.
        if value == "False":
            return f"--no-{flags[name].removeprefix('--')}"
        shown = "" if value in (None, "True") else " " + value.strip("'")
        return f"{flags[name]}{shown}"

    names = "|".join(sorted(flags, key=len, reverse=True))
    setting = rf"(?<![\w./'-])(?:engine\.)?(?P<name>{names})\b(?:=(?P<value>'[^']*'|[^\s:;,)]+))?"
    return re.sub(r"(--[\w-]+) \(\1\)", r"\1", re.sub(setting, written, message))


def sentence(text: str) -> str:
    """``text`` with its first letter in upper case and the others as they are."""
    return text[:1].upper() + text[1:]


def finite(text: str) -> float:
    """The type of a flag that takes a number, but neither NaN nor infinity.

    Raises:
        argparse.ArgumentTypeError: The text is not such a number.
    """
    with suppress(ValueError):
        number = float(text)
        if isfinite(number):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no finite number")


def whole(*, least: int, most: float = inf) -> Callable[[str], int]:
    """The type of a flag that takes a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        with suppress(ValueError):
            if least <= (number := int(text)) <= most:
                return number
        said = f"from {least} to {most}" if isfinite(most) else f"of {least} or more"
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {said}")

    return read


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `server_of` reads."""
    add = parser.add_argument
    add("--address", default="127.0.0.1:50051", help="the gRPC server, host:port")
    add("--tls", action="store_true", help="the server has TLS, with a well-known authority")
    add("--tls-ca", type=Path, help="the server has TLS, with this authority (PEM)")


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for the model to ask; its default is ""."""
    parser.add_argument(
        "--model", default="", help="which of several models; the only one if absent"
    )


def server_of(arguments: argparse.Namespace) -> "Server":
    """The server named by the flags, with the API key from the environment."""
    from quire.cluster.cli.server import Server

    return Server(
        address=arguments.address,
        tls=arguments.tls,
        tls_ca=arguments.tls_ca,
        api_key=os.environ.get("QUIRE_API_KEY"),
    )
