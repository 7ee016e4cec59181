"""Arguments that are not written as JSON, as JSON: those between tags, and Python's."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES = 8
_KINDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),  # Before int, which it is too.
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)


def kinds_of(name: str, parameters: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that an argument may have by its tool's schema; ``None`` for any."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _kinds(schema, parameters, _MAX_REFERENCES)


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a ``$ref`` within ``root`` names; ``None`` where it names none."""
    target: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        target = target.get(key) if isinstance(target, dict) else None
    return target


def is_sendable(text: str) -> bool:
    """Whether it is all characters: escapes can name half of one, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def written(text: str) -> str:
    """A part of a string's text as it stands in JSON, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StrictStrings:
    """JSON in pieces, in which models write what JSON does not allow in a string: line breaks and
    other control characters as they are, and escapes that there are not."""

    def __init__(self) -> None:
        self._is_inside = False
        self._held = ""  # A backslash at the end of a piece.

    def strict(self, text: str) -> str:
        """The next piece, as JSON has it."""
        text, self._held = self._held + text, ""
        if text.endswith("\\") and (len(text) - len(text.rstrip("\\"))) % 2:
            text, self._held = text[:-1], "\\"
        return _SPECIAL.sub(self._special, text)

    def _special(self, found: re.Match[str]) -> str:
        mark = found[0]
        if mark == '"':
            self._is_inside = not self._is_inside
        elif self._is_inside and mark < " ":
            return written(mark)
        elif self._is_inside and mark[0] == "\\" and mark[1:] not in _ESCAPES:
            return mark[1:] if mark == "\\'" else f"\\{mark}"
        return mark


_SPECIAL = re.compile(r'["\x00-\x1f]|\\.', re.DOTALL)
_ESCAPES = set('"\\/bfnrtu')


def tagged_as_json(text: str, kinds: frozenset[str] | None) -> str:
    """An argument that stands between tags: as it is where it is JSON that the schema may mean,
    else a string."""
    given = text.strip()
    for candidate in (given, _CONSTANTS.get(given, given)):
        try:
            value = json.loads(candidate, parse_constant=_no_number)
        except (ValueError, RecursionError):
            continue
        if kinds is None or "string" not in kinds or not kinds.isdisjoint(_kinds_of_value(value)):
            return candidate
    if kinds is not None and "string" not in kinds and given[:1] in ("[", "{", "("):
        return python_as_json(given)  # As a template writes it that has no `tojson`.
    return f'"{written(text)}"'


def python_as_json(text: str) -> str:
    """A Python literal, or JSON, as JSON; what is neither is a string."""
    try:
        json.loads(text, parse_constant=_no_number)
        return text.strip()
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return shown if is_sendable(shown) else json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f'"{written(text.strip())}"'


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
