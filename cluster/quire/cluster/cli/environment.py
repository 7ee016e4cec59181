"""Settings in the environment: each flag of ``quire serve`` has a variable, named by one rule.

    --max-model-len   QUIRE_MAX_MODEL_LEN
    MODEL             QUIRE_MODEL
    --api-key         QUIRE_API_KEYS, since clients send the key in QUIRE_API_KEY

A given flag overrides its variable, and a variable overrides the file of ``--config``. An empty
variable counts as absent. A list is written as words, as in a shell. A switch is one of 1, true,
yes, on, 0, false, no and off.
"""

import argparse
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from quire.worker.request.errors import ConfigError

PREFIX = "QUIRE_"
OTHERS = frozenset(
    PREFIX + name
    for name in (
        *("ADAPTER_DIR", "API_KEY", "BUILD_NATIVE", "CACHE_DIR", "CRDS", "KEEP_LOGS", "LINE"),
        *("NATIVE", "NATIVE_ISA", "NATIVE_SANITIZE", "STATE_DIR"),
    )
)
"""Variables that are not settings of ``quire serve``."""

_OTHERWISE = {"--api-key": f"{PREFIX}API_KEYS"}
_ONLY_FLAGS = ("help", "print_config")
_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
# Kubernetes sets these in each pod for a service called quire-http or quire-grpc.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True)
class FromEnvironment:
    """Settings in the environment for a command's flags that were not given."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values by argparse destination."""
    variables: dict[str, str] = field(default_factory=dict)
    """Names of the variables by argparse destination."""
    notes: list[str] = field(default_factory=list)
    """Notes on variables that have no effect although their names suggest one."""


def variable_of(action: argparse.Action) -> str | None:
    """The variable of a flag or of MODEL; ``None`` if it has none."""
    if action.dest in _ONLY_FLAGS:
        return None
    flag = next((each for each in action.option_strings if each.startswith("--")), action.dest)
    return _OTHERWISE.get(flag) or PREFIX + flag.lstrip("-").replace("-", "_").upper()


def read_environment(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str],
    *,
    given: Collection[str],
    close: float,
) -> FromEnvironment:
    """Reads the variables of the flags of ``parser`` whose destinations are not ``given``.
    ``close``: how similar an unknown variable's flag must be to a known flag for a note to suggest
    it, from 0 to 1.

    Raises:
        ConfigError: A value cannot be read; the message names the variable.
    """
    found = FromEnvironment()
    flags: dict[str, str] = {}
    for action in parser._actions:
        variable = variable_of(action)
        if variable is None:
            continue
        flags[_as_flag(variable)] = variable
        text = environ.get(variable, "").strip()
        if not text or action.dest in given:
            continue
        if variable.endswith("_PORT") and _SERVICE_LINK.match(text):
            found.notes.append(
                f"{variable}={text} is what Kubernetes tells of a service, and sets no port"
            )
            continue
        found.values[action.dest] = _value(parser, action, variable, text)
        found.variables[action.dest] = variable
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in OTHERS | set(flags.values()):
            for near in get_close_matches(_as_flag(variable), flags, n=1, cutoff=close):
                found.notes.append(f"{variable} is no setting: is {flags[near]} meant?")
    return found


def _as_flag(variable: str) -> str:
    return f"--{variable.removeprefix(PREFIX).lower().replace('_', '-')}"


def _value(
    parser: argparse.ArgumentParser, action: argparse.Action, variable: str, text: str
) -> object:
    """The value of the flag for ``text``, parsed by argparse. Raises ConfigError."""
    if isinstance(action, argparse._StoreTrueAction | argparse.BooleanOptionalAction):
        if text.lower() not in _SWITCH:
            raise ConfigError(f"{variable}={text!r}: must be one of {', '.join(_SWITCH)}")
        return _SWITCH[text.lower()]
    several = action.nargs in ("*", "+")
    repeated = isinstance(action, argparse._AppendAction)
    try:
        words = shlex.split(text) if several or repeated else [text]
    except ValueError as error:
        raise ConfigError(f"{variable}: must be words as in a shell: {error}") from error
    try:
        if repeated:
            return [_read(parser, action, [word]) for word in words]
        return _read(parser, action, words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{variable}={text!r}: {error.message}") from error


def _read(parser: argparse.ArgumentParser, action: argparse.Action, words: Sequence[str]) -> object:
    """Applies types and choices as on the command line. Raises ArgumentError."""
    value: object = parser._get_values(action, list(words))
    return value
