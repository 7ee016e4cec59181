"""Flags for a configuration's fields. Types and defaults come from its dataclass alone."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.worker.request.errors import ConfigError

Flags = argparse._ArgumentGroup


def add_fields(flags: Flags, kind: type[Any], helps: Mapping[str, str], **defaults: object) -> None:
    """Adds ``--some-field`` for each field of ``kind`` that ``helps`` names. ``defaults`` override
    the fields' own defaults."""
    types, known = get_type_hints(kind), {field.name: field.default for field in fields(kind)}
    for name, what in helps.items():
        default = defaults.get(name, known[name])
        assert default is not MISSING, name
        flag = f"--{name.replace('_', '-')}"
        flags.add_argument(flag, default=default, help=what, **_options(types[name], default))


def given_fields(kind: type[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the fields of ``kind`` that have a flag."""
    given = vars(arguments)
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def chat_template(given: str | None) -> str | None:
    """The template's text, given as a file or written out."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {given}: cannot be read as text: {error}") from error


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


def _options(type_: Any, default: object) -> dict[str, Any]:
    """The options of ``add_argument`` for a field's type."""
    members = get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)
    plain = next(each for each in members if each is not NoneType)
    if plain is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    if get_origin(plain) is Literal:
        return {"choices": get_args(plain)}
    return {"type": plain if plain in (int, float, Path) else str}


def absolute(given: Path) -> Path:
    """An absolute path if ``given`` exists here, for processes with another working directory.
    Other paths are kept: they may have a meaning elsewhere."""
    return given.absolute() if given.exists() else given
