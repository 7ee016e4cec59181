"""Reads JSON schemas: the place of which an error speaks, and what llguidance cannot do well.

What takes llguidance long, and no limit of its own bounds, was measured with 1.9.1: an object's
properties take 25 µs each and 0.06 µs for each pair of them, a ``multipleOf`` 4 µs for each unit of
its digits, and patterns that must hold together many times as long for each more. The limits here
are about half a second's work, and say so at once. It reads some fractions of 16 or more digits
one unit in the last place off, and writes the digits of integers above 2**53 that a float has.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with an object whose keys are names, and whose values are schemas."""
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
"""Keywords whose values are no schemas."""
_QUOTED = ("pattern", "format", "$ref", "type")
"""Keywords whose values errors quote."""
_ALL_OF = re.compile(r"/allOf/\d+")
_EMBEDDED = re.compile(r"%json\s*")
_MAX_PROPERTY_WORK = 20_000
_PAIRS_OF_A_PROPERTY = 400
_MAX_MULTIPLE = 100_000
_MAX_EXPONENT, _MAX_DIGITS, _MAX_WHOLE = 22, 19, 2**53
"""Of a number that is read exactly: greater powers of ten are no floats, 19 digits fit 64 bits."""
_MAX_PATTERNS_TOGETHER = 12
_MAX_REFERENCES = 8
"""References behind references that are followed."""
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


class _Misread(float):
    """A number that llguidance reads as another one."""


def _number(text: str) -> float:
    """``text`` as a float. llguidance reads it as an integer times, or divided by, a power of ten,
    each rounded (serde_json without its feature float_roundtrip)."""
    value = float(text)
    _, digits, exponent = Decimal(text).as_tuple()
    if not isinstance(exponent, int) or abs(exponent) > _MAX_EXPONENT or len(digits) > _MAX_DIGITS:
        return _Misread(value)
    significand = int("".join(map(str, digits)))
    power = 10.0 ** abs(exponent)
    read = float(significand) * power if exponent > 0 else float(significand) / power
    return value if read == abs(value) else _Misread(value)


_DECODER = json.JSONDecoder(parse_float=_number)


def check_schema(schema: str) -> None:
    """Raises ValueError: a JSON text is no schema that is compiled soon and as it is meant."""
    _check(_DECODER.decode(schema))


def check_embedded_schemas(grammar: str) -> None:
    """`check_schema` of every schema in a grammar in Lark's syntax."""
    for found in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = _DECODER.raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # It is refused for what it is.
        _check(schema)


def _check(schema: Any) -> None:
    num_properties: list[int] = []
    multiples: list[int] = []
    together = _Together()
    is_merged = False
    for path, key, value in _keywords(schema):
        if key == "properties" and isinstance(value, dict):
            num_properties.append(len(value))
        elif key == "multipleOf" and isinstance(value, int | float) and math.isfinite(value):
            multiples.append(_digits(value))
            if sum(multiples) > _MAX_MULTIPLE:
                raise ValueError(f"multipleOf={value}: {_TOO_LONG}")
        elif key == "pattern":
            together.patterns[_ALL_OF.sub("", path)] += 1
        elif key == "$ref" and isinstance(value, str):
            is_merged = True
            together.references[_ALL_OF.sub("", path)].append(value.removeprefix("#"))
        elif key == "allOf":
            is_merged = True
        elif key in ("const", "enum"):
            _check_numbers(f"{path}/{key}", value)
    most = max(map(together.number, together.patterns | together.references), default=0)
    if most > _MAX_PATTERNS_TOGETHER:
        raise ValueError(f"{most} patterns for one text, by allOf or $ref: {_TOO_LONG}")
    if is_merged and math.lcm(*filter(None, multiples)) > _MAX_MULTIPLE:
        raise ValueError(f"multipleOf of allOf or $ref have too large a multiple: {_TOO_LONG}")
    total = sum(num_properties)
    pairs = total**2 if is_merged else sum(number**2 for number in num_properties)
    if total + pairs / _PAIRS_OF_A_PROPERTY > _MAX_PROPERTY_WORK:
        raise ValueError(f"{total} properties: {_TOO_LONG}")


class _Together:
    """Patterns that one text must match, by the place of its schema without any ``allOf``."""

    def __init__(self) -> None:
        self.patterns: Counter[str] = Counter()
        self.references: defaultdict[str, list[str]] = defaultdict(list)
        self._known: dict[tuple[str, int], int] = {}

    def number(self, path: str, depth: int = _MAX_REFERENCES) -> int:
        """Those at ``path``, with those that it refers to."""
        if (path, depth) not in self._known:
            targets = self.references.get(path, ()) if depth else ()
            referred = sum(self.number(target, depth - 1) for target in targets)
            self._known[path, depth] = self.patterns[path] + referred
        return self._known[path, depth]


def _check_numbers(path: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | dict):
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, _Misread) or (
            isinstance(each, int | float) and abs(each) > _MAX_WHOLE
        ):
            raise ValueError(f"{path}: {each!r} would not be written exactly: 15 digits are")


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
