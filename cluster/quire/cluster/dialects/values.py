"""Converts arguments written between tags or in Python's syntax to JSON."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from quire.cluster.dialects.strict_json import CONSTANTS, StrictJson, written

_MAX_REFERENCES = 8
_NUMBER_BEGUN = re.compile(r"-?([0-9]|[1-9][0-9]{1,400})(\.[0-9]*)?([eE][+-]?[0-9]*)?")
_KINDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),  # Before int, its base class.
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


def kinds_of(name: str, parameters: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that an argument may have by its tool's schema; ``None`` means any."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _kinds(schema, parameters, _MAX_REFERENCES)


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a ``$ref`` within ``root`` refers to; ``None`` if it refers to none."""
    target: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        target = target.get(key) if isinstance(target, dict) else None
    return target


def is_sendable(text: str) -> bool:
    """Whether the text can be encoded: JSON escapes can name half a character (a lone
    surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tagged_as_json(text: str, kinds: frozenset[str] | None) -> str:
    """Converts an argument between tags: it is kept if it is JSON of a type that the schema allows,
    and becomes a string otherwise."""
    given = text.strip()
    is_text = kinds is not None and "string" in kinds
    named = given if kinds is None or is_text else given.capitalize()
    for candidate in (given, CONSTANTS.get(named, given)):
        try:
            value = json.loads(candidate, parse_constant=_no_number)
        except (ValueError, RecursionError):
            continue
        if not is_text or not (kinds or set()).isdisjoint(_kinds_of_value(value)):
            return candidate
    if kinds is not None and not is_text and given[:1] in ("[", "{", "("):
        return python_as_json(given)  # Templates without `tojson` write this.
    return f'"{written(text)}"'


def python_as_json(text: str) -> str:
    """Converts a Python literal or JSON to JSON. Other text becomes a string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_no_number)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return shown if is_sendable(shown) else json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        strict = StrictJson()
        shown = strict.strict(f"{text}\n").strip()
        return shown if strict.is_whole else f'"{written(text)}"'


def cut_as_json(text: str) -> str:
    """The beginning of a cut-off value, as far as its JSON is certain."""
    text = text.strip()
    if _NUMBER_BEGUN.fullmatch(text) or any(each.startswith(text) for each in CONSTANTS.values()):
        return text
    return StrictJson().strict(text)


def _kinds(schema: Any, root: Mapping[str, Any], num_left: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or not num_left:
        return None
    if isinstance(schema.get("$ref"), str):
        return _kinds(resolved(schema["$ref"], root), root, num_left - 1)
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        kinds = {each for each in named if isinstance(each, str)}
        return frozenset(kinds | {"integer"} if "number" in kinds else kinds)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(kind for value in values for kind in _kinds_of_value(value))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            each = [_kinds(choice, root, num_left - 1) for choice in schema[key]]
            known = [kinds for kinds in each if kinds is not None]
            return frozenset().union(*known) if len(known) == len(each) else None
    return None


def _kinds_of_value(value: object) -> tuple[str, ...]:
    return next(kinds for kind, kinds in _KINDS if isinstance(value, kind))


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
