"""Checks JSON schemas for numbers that llguidance would not enforce exactly, and finds the place in
a schema that an error is about.

llguidance 1.9.1 reads some fractions of 16 or more digits one unit in the last place off, and
writes integers above 2**53 with the digits of a float. Bounds are floats too, integers between
bounds have 64 bits, and if both bounds are -2**63, the process ends. The ``lcm`` of several
``multipleOf`` wraps at 32 bits.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from quire.worker.text.grammar.json_schema_drafts import NAMES, VALUES, schemas, settled

_QUOTED = ("pattern", "format", "$ref", "type")
"""Keywords whose values are quoted in errors."""
_MAX_EXPONENT, _MAX_DIGITS, _MAX_WHOLE = 22, 19, 2**53
"""Limits of numbers that are read exactly: greater powers of ten are not exact as floats, and 19
digits fit 64 bits."""
_UPPER = frozenset({"maximum", "exclusiveMaximum"})
_EXCLUSIVE = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
_BOUNDS = _UPPER | _EXCLUSIVE | {"minimum"}
_MAX_INTEGER = 2**63 - 1
_MAX_COMMON_MULTIPLE = 2**16 - 1
"""The square of this number fits 32 bits."""
# Keywords that also are usual words in errors, where they do not name a place.
_USUAL = frozenset({"type", "schema", "items", "required", "format", "const", "enum", "properties"})


def place_of(schema: str, error: str) -> str:
    """``" at POINTER"``, a JSON pointer to the first keyword of ``schema`` that ``error`` names or
    whose value it quotes; empty if there is none."""
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


_LARK = re.compile(
    r"""
      (?://|\#)[^\n]*
    | "(?:\\.|[^"\\])*"
    | /(?:\\.|[^/\\])+/
    | <[^<>\s]+>
    | (?P<json>%json)\s*
    """,
    re.VERBOSE | re.DOTALL,
)
"""Tokens of a grammar other than names and operators: comments, texts, patterns, ``%json``."""


class _Misread(float):
    """A number that llguidance reads as a different number."""


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


def checked(text: str) -> str:
    """The schema to pass to llguidance. Raises ValueError if ``text`` is not JSON, or llguidance
    would not enforce the schema exactly."""
    given = _DECODER.decode(text)
    schema = settled(given)
    if schema is not given:
        text = json.dumps(schema)
        schema = _DECODER.decode(text)  # Numbers may have been written differently.
    _check_exact(schema)
    return text


def checked_embedded(grammar: str) -> str:
    """A ``grammar`` in Lark's syntax with its schemas as `checked` returns them. Raises ValueError
    if one would not be enforced exactly."""
    pieces, at = [], 0
    while found := _LARK.search(grammar, at):
        pieces.append(grammar[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                _, end = _DECODER.raw_decode(grammar, at)
            except (ValueError, RecursionError):
                continue  # llguidance refuses invalid JSON.
            pieces.append(checked(grammar[at:end]))
            at = end
    return "".join([*pieces, grammar[at:]])


def _check_exact(schema: Any) -> None:
    """Raises ValueError if a number of ``schema`` would not be enforced exactly, or not be read."""
    multiples: set[float] = set()
    is_merged = False
    for path, key, value in _keywords(schema):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}/{key}: {value} is too great for a number, or none")
        if key in _BOUNDS:
            _check_bound(path, key, value)
        elif key == "multipleOf" and _is_number(value):
            multiples.add(value)
        elif key in ("const", "enum"):
            _check_values(f"{path}/{key}", value)
        elif key == "$ref" and isinstance(value, str):
            _check_target(unquote(value.removeprefix("#")))
        is_merged |= key in ("$ref", "allOf")
    if is_merged:
        _check_multiples(multiples)


def _check_bound(path: str, key: str, value: Any) -> None:
    """Raises ValueError if llguidance would not enforce the bound exactly."""
    if not _is_number(value):
        return
    is_exclusive = key in _EXCLUSIVE
    if key in _UPPER and value >= _MAX_INTEGER + is_exclusive:
        return  # Integers in outputs are not greater, and other numbers are refused.
    is_exact = abs(value) <= _MAX_WHOLE - is_exclusive
    if not is_exact and not is_exclusive and abs(value) < _MAX_INTEGER:
        read = float(value)
        is_exact = read == value == int(Decimal(repr(read)))
    if not is_exact or isinstance(value, _Misread):
        raise ValueError(f"{path}/{key}: {value!r} would not be kept exactly: 15 digits are")


def _check_multiples(multiples: Iterable[float]) -> None:
    """Raises ValueError if llguidance cannot enforce all ``multiples`` at the same time."""
    numbers = [Decimal(repr(each)) for each in multiples if each]
    unit = Decimal(10) ** min((int(each.as_tuple().exponent) for each in numbers), default=0)
    if len(numbers) > 1 and math.lcm(*(int(each / unit) for each in numbers)) > (
        _MAX_COMMON_MULTIPLE
    ):
        raise ValueError(
            f"multipleOf of allOf or $ref: {min(numbers)} and {max(numbers)} would not be kept "
            "together exactly"
        )


def _check_target(target: str) -> None:
    """Raises ValueError if a reference points into a value, which is not checked as a schema."""
    is_name = False
    for step in target.rpartition("#")[2].split("/")[1:]:
        if not is_name and step in VALUES:
            raise ValueError(f"$ref to {target!r}: {step} holds no schema")
        is_name = not is_name and step in NAMES


def _check_values(path: str, value: Any) -> None:
    """Raises ValueError if a number in ``value`` is not exact."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | dict):
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, _Misread) or (
            isinstance(each, int | float) and abs(each) > _MAX_WHOLE
        ):
            raise ValueError(f"{path}: {each!r} would not be written exactly: 15 digits are")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Every keyword: the JSON pointer to its schema, the keyword and its value."""
    for path, each in schemas(schema):
        yield from ((path, key, value) for key, value in each.items())
