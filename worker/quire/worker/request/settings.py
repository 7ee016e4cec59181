"""Settings are declared in branches: dataclasses of a few fields, which stand beside what they set.

A field's docstring is the help text of its flag and its row in the documentation. Its flag is its
name with dashes, unless `setting` says otherwise.

A class of settings is the union of its branches. It has their fields under the same flat names
that users write in flags, variables and files, and it is an instance of each of them, so that a
part of the code can ask for its own branch alone. A process gets the branches that it uses, as
`part` takes them out of the whole.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields
from functools import cache, partial
from math import inf
from numbers import Integral, Real
from operator import contains
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from quire.worker.request.errors import ConfigError

_Kind = TypeVar("_Kind", bound="Branch")

_TYPES: Mapping[object, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    Path: ((str, PathLike), "a path"),
}


def setting(
    default: Any,
    *,
    flag: str | None = "",
    short: str = "",
    metavar: str = "",
    choices: Collection[Any] = (),
    listed: Collection[Any] = (),
) -> Any:
    """A dataclass field with this default.

    ``flag``: the name of its flag, without dashes; ``None`` if it has none, and can only stand in a
    file. ``short``: a second name of the flag, with its dash. ``metavar``: the flag's value in the
    help text. ``choices``: the only values; a mapping also says what each means. ``listed``: names
    that a value may have, which the help text lists.
    """
    options = {
        "flag": flag,
        "short": short,
        "metavar": metavar,
        "choices": choices,
        "listed": listed,
    }
    given = {name: value for name, value in options.items() if value or value is None}
    return field(default=default, metadata=given)


class Branch:
    """The base of each branch, and of each union of branches."""

    title: ClassVar[str] = ""
    """The group of the branch's flags in ``--help``. Fields of a branch without one have none."""
    about: ClassVar[str] = ""
    """Text below the title."""

    def __post_init__(self) -> None:
        """Checks the types of all fields; then each branch checks its own. Raises ConfigError: a
        value cannot work."""
        own: type = type(self)
        for name, (is_one, rule) in _rules_of(own).items():
            self._must(is_one(getattr(self, name)), name, rule)
        for kind in reversed(type(self).__mro__):
            if check := vars(kind).get("_check"):
                check(self)

    def _must(self, ok: bool, name: str, rule: str) -> None:
        """Raises ConfigError: the field ``name`` does not follow its ``rule``."""
        if not ok:
            raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")

    def _must_be_at_least(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._must(value is None or value >= least, name, f"must be {least} or more")

    def _must_be_finite(self, *names: str, above_zero: bool = False) -> None:
        rule = f"must be {'above 0' if above_zero else '0 or more'}, and finite"
        for name in names:
            value = getattr(self, name)
            self._must((value > 0 if above_zero else value >= 0) and value < inf, name, rule)


def part(kind: type[_Kind], config: Branch, **changes: Any) -> _Kind:
    """The fields of ``kind`` that ``config`` has too, with ``changes``."""
    known = {field.name for field in fields(config)}  # type: ignore[arg-type]
    names = [field.name for field in fields(kind) if field.name in known]  # type: ignore[arg-type]
    return kind(**{name: getattr(config, name) for name in names} | changes)


def plain_type(hint: Any) -> Any:
    """The type, without ``None`` if that is allowed too."""
    members = [each for each in get_args(hint) if each is not NoneType]
    return members[0] if NoneType in get_args(hint) and len(members) == 1 else hint


@cache
def _rules_of(kind: type) -> dict[str, tuple[Callable[[Any], bool], str]]:
    """For fields that have numbers, switches, paths or a few values: what a value must be, as a
    test and in words."""
    found: dict[str, tuple[Callable[[Any], bool], str]] = {}
    for name, hint in get_type_hints(kind).items():
        type_, is_optional = plain_type(hint), NoneType in get_args(hint)
        none = ", or None" if is_optional else ""
        if get_origin(type_) is Literal:
            values = (*get_args(type_), *([None] if is_optional else []))
            found[name] = partial(contains, values), f"one of {get_args(type_)}{none}"
        elif type_ in _TYPES:
            types, told = _TYPES[type_]
            types = (*types, NoneType) if is_optional else types
            found[name] = partial(_is_of, types), f"must be {told}{none}"
    return found


def _is_of(types: tuple[type, ...], value: object) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


class Attribute(NamedTuple):
    annotation: str
    """The annotation as the source has it."""
    text: str
    """The docstring below the attribute, as one paragraph; empty if there is none."""


def attributes_of(owner: type) -> dict[str, Attribute]:
    """The annotated attributes that ``owner`` itself declares, by name."""
    found: dict[str, Attribute] = {}
    name = ""
    for node in _classes_in(owner.__module__)[owner.__qualname__].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = Attribute(ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            text = " ".join(inspect.cleandoc(str(node.value.value)).split())
            found[name] = found[name]._replace(text=text)
    return found


@cache
def _classes_in(module: str) -> dict[str, ast.ClassDef]:
    """The classes in a module's source by qualified name. Each source is parsed once."""
    found = {}

    def look(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[place + child.name] = child
                look(child, f"{place}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                look(child, f"{place}{child.name}.<locals>.")

    look(ast.parse(inspect.getsource(sys.modules[module])), "")
    return found
