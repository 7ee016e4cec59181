"""Reads JSON schemas: the place of which an error speaks, and what would take too long to compile.

What takes llguidance long, and no limit of its own bounds, was measured with 1.9.1: an object's
properties take 25 µs each and 0.06 µs for each pair of them, a ``multipleOf`` 4 µs for each unit of
its digits, and patterns that must hold together many times as long for each more. The limits here
are about half a second's work, and say so at once.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with an object whose keys are names, and whose values are schemas."""
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
"""Keywords whose values are no schemas."""
_QUOTED = ("pattern", "format", "$ref", "type")
"""Keywords whose values errors quote."""
_EMBEDDED = re.compile(r"%json\s*")
_MAX_PROPERTY_WORK = 20_000
_PAIRS_OF_A_PROPERTY = 400
_MAX_MULTIPLE = 100_000
_MAX_PATTERNS_TOGETHER = 12
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


def check_embedded_work(grammar: str) -> None:
    """`check_work` of every schema in a grammar in Lark's syntax."""
    decoder = json.JSONDecoder()
    for found in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # It is refused for what it is.
        check_work(schema)


def check_work(schema: Any) -> None:
    """Raises ValueError: a JSON value, as a schema, takes too long to compile."""
    num_properties: list[int] = []
    multiples: list[int] = []
    is_merged = False
    for _, key, value in _keywords(schema):
        if key == "properties" and isinstance(value, dict):
            num_properties.append(len(value))
        elif key == "multipleOf" and isinstance(value, int | float) and math.isfinite(value):
            multiples.append(_digits(value))
            if sum(multiples) > _MAX_MULTIPLE:
                raise ValueError(f"multipleOf={value}: {_TOO_LONG}")
        elif key == "$ref":
            is_merged = True
        elif key == "allOf" and isinstance(value, list):
            is_merged = True
            together = sum(isinstance(each, dict) and "pattern" in each for each in value)
            if together > _MAX_PATTERNS_TOGETHER:
                raise ValueError(f"{together} patterns in allOf: {_TOO_LONG}")
    if is_merged and math.lcm(*filter(None, multiples)) > _MAX_MULTIPLE:
        raise ValueError(f"multipleOf of allOf or $ref have too large a multiple: {_TOO_LONG}")
    total = sum(num_properties)
    pairs = total**2 if is_merged else sum(number**2 for number in num_properties)
    if total + pairs / _PAIRS_OF_A_PROPERTY > _MAX_PROPERTY_WORK:
        raise ValueError(f"{total} properties: {_TOO_LONG}")


_TOO_LONG = "compiling that takes too long"


def _digits(value: float) -> int:
    """A number's digits as an integer: 25 for 0.25."""
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))


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
