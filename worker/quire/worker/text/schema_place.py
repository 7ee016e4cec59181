"""Finds the place in a JSON schema of which an error speaks."""

import json
import re
from collections.abc import Iterator
from typing import Any

_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with an object whose keys are names, and whose values are schemas."""
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
"""Keywords whose values are no schemas."""
_QUOTED = ("pattern", "format", "$ref", "type")
"""Keywords whose values errors quote."""
# Words of errors that also are keywords, where they name a type or say nothing.
_USUAL = frozenset({"type", "schema", "items", "required", "format", "const", "enum", "properties"})


def place_of(schema: str, error: str) -> str:
    """``" at POINTER"`` of the first keyword of ``schema`` that ``error`` names, or whose value it
    quotes, as a JSON pointer; empty where there is none."""
    quoted = set(re.findall(r'"([^"\s]+)"', error))
    words = quoted | set(re.findall(r"[a-zA-Z]{3,}", error)) - _USUAL
    try:
        keywords = list(_keywords(json.loads(schema)))
    except (ValueError, RecursionError):
        return ""
    found = [path for path, key, _ in keywords if key in words]
    found += [
        path
        for path, key, value in keywords
        if key in _QUOTED and isinstance(value, str) and value.lstrip("#") in error
    ]
    return f" at {found[0] or '/'}" if found else ""


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Every keyword and its value, behind the pointer to its schema."""
    waiting = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}/{index}", each) for index, each in enumerate(value)][::-1]
        elif isinstance(value, dict):
            yield from ((path, key, each) for key, each in value.items())
            for key, each in reversed(value.items()):
                if key in _NAMES and isinstance(each, dict):
                    waiting += [
                        (f"{path}/{key}/{_escaped(name)}", one)
                        for name, one in reversed(each.items())
                    ]
                elif key not in _VALUES:
                    waiting.append((f"{path}/{_escaped(key)}", each))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
