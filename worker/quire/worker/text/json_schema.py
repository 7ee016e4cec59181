"""Reads JSON schemas: the place of which an error speaks, and what llguidance cannot do well.

What each keyword takes llguidance was measured with 1.9.1: an object's properties take 25 µs each
and 0.06 µs for each pair of them, a ``multipleOf`` 3 µs for each unit of its digits, and patterns
that must hold together many times as long for each more. It reads some fractions of 16 or more
digits one unit in the last place off, and writes the digits of integers above 2**53 that a float
has. Bounds are floats as well, integers between them have 64 bits, and whose least and greatest are
-2**63 end the process. An ``lcm`` of ``multipleOf`` wraps at 32 bits.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from quire.worker.text.regex_work import regex_size
from quire.worker.text.work import TOO_LONG, Work, check_chain

_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with an object whose keys are names, and whose values are schemas."""
_VALUES = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
"""Keywords whose values are no schemas."""
_QUOTED = ("pattern", "format", "$ref", "type")
"""Keywords whose values errors quote."""
_ALL_OF = re.compile(r"/allOf/\d+")
_ANY_NAME = re.compile(r"/(?:patternProperties/[^/]*|additionalProperties|items)(?=/|$)")
_NAMED = re.compile(
    r"/(?:(?:p|patternP)roperties/[^/]*|additionalProperties|prefixItems/\d+|items|\*)(?=/|$)"
)
_SAID_ONLY = frozenset(
    {"$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentMediaType", "contentEncoding"}
)
"""Keywords that do not change what is valid."""
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
"""The formats that llguidance keeps. It refuses others, which are annotations."""
_UNITS = {
    "properties": 1,
    "required": 1,
    "prefixItems": 1,
    "anyOf": 4,
    "oneOf": 4,
    "allOf": 4,
    "$ref": 3,
    "pattern": 2,
    "format": 12,
    "minimum": 8,
    "maximum": 8,
    "exclusiveMinimum": 8,
    "exclusiveMaximum": 8,
}
"""Units of work of a keyword, or of each of its values."""
_CAUSES = {"properties": "properties", "required": "required properties", "$ref": "references"}
_PAIRS_OF_A_PROPERTY = 400
_PAIR = 10
_DIGITS_A_UNIT = 8
_MAX_MULTIPLE = 16_000
_MAX_EXPONENT, _MAX_DIGITS, _MAX_WHOLE = 22, 19, 2**53
"""Of a number that is read exactly: greater powers of ten are no floats, 19 digits fit 64 bits."""
_UPPER = frozenset({"maximum", "exclusiveMaximum"})
_EXCLUSIVE = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
_BOUNDS = _UPPER | _EXCLUSIVE | {"minimum"}
_MAX_INTEGER = 2**63 - 1
_MAX_COMMON_MULTIPLE = 2**16 - 1
"""Times itself it fits 32 bits."""
_MAX_PATTERNS_TOGETHER = 8
_MAX_MERGED = 5_000
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


DECODER = json.JSONDecoder(parse_float=_number)


def checked(text: str) -> str:
    """A schema as llguidance is to get it. Raises ValueError: a JSON text is no schema that is
    compiled soon and as it is meant."""
    given = DECODER.decode(text)
    schema = without_unknown_formats(given)
    if schema is not given:
        text = json.dumps(schema)
        schema = DECODER.decode(text)  # Its numbers may be written in another way.
    work = Work()
    add_schema(schema, work)
    work.check(len(text.encode()))
    return text


def is_annotation(key: str, value: Any) -> bool:
    """Whether a keyword with this value leaves open what is valid."""
    is_unknown_format = key == "format" and isinstance(value, str) and value not in _FORMATS
    return is_unknown_format or key in _SAID_ONLY or key.startswith("x-")


def without_unknown_formats(schema: Any) -> Any:
    """``schema`` itself, or a copy where it has formats that are annotations."""

    def unknown(schema: Any) -> list[dict[str, Any]]:
        found = (each for _, each in _schemas(schema) if "format" in each)
        return [each for each in found if is_annotation("format", each["format"])]

    if unknown(schema):
        schema = json.loads(json.dumps(schema))
        for each in unknown(schema):
            del each["format"]
    return schema


def add_schema(schema: Any, work: Work) -> None:
    """Adds what compiling ``schema`` takes to ``work``. Raises ValueError: it is not compiled as it
    is meant, or takes long beyond any measure of work."""
    multiples: set[float] = set()
    num_properties: list[int] = []
    together = _Together()
    references: list[tuple[str, str]] = []
    paths: set[str] = set()
    merging: set[str] = set()
    alone: set[str] = set()
    num_keys: Counter[str] = Counter()
    is_merged = False
    for path, key, value in _keywords(schema):
        num_keys[path] += key not in _SAID_ONLY
        paths.add(path)
        if key in _UNITS:
            units = _UNITS[key]
            number = len(value) if isinstance(value, list | dict) else 1
            work.add(_CAUSES.get(key, key), units * number, number=number)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}/{key}: {value} is too great for a number, or none")
        if key in _BOUNDS:
            _check_bound(path, key, value)
        if key == "properties" and isinstance(value, dict):
            num_properties.append(len(value))
        elif key == "patternProperties" and isinstance(value, dict):
            _add_patterns(value, work)
        elif key == "multipleOf" and _is_number(value):
            multiples.add(value)
            work.add(f"multipleOf={value}", _digits(value) / _DIGITS_A_UNIT, number=0)
        elif key == "pattern":
            together.add_pattern(path)
            _add_patterns([value], work)
        elif key == "$ref" and isinstance(value, str):
            is_merged = True
            target = unquote(value.removeprefix("#"))
            together.add_reference(path, target)
            references.append((path, target))
        elif key == "allOf":
            is_merged = True
            alone.update({path} if isinstance(value, list) and len(value) == 1 else ())
            merging.add(path)
        elif key in ("const", "enum"):
            work.add("objects and lists in enum", _check_values(f"{path}/{key}", value))
    most = together.most() if is_merged else 0
    if most > _MAX_PATTERNS_TOGETHER:
        raise ValueError(f"{most} patterns for one text, by allOf or $ref: {TOO_LONG}")
    if is_merged:
        _check_multiples(multiples)
    total = sum(num_properties)
    pairs = total**2 if is_merged else sum(number**2 for number in num_properties)
    work.add(_CAUSES["properties"], pairs / _PAIRS_OF_A_PROPERTY, number=0)
    for _, target in references:
        _check_target(target)
    _check_references(paths, references)
    merging -= {path for path in alone if num_keys[path] == 1}
    merged = [
        (path, target)
        for path, target in references
        if num_keys[path] > 1 or any(outer in merging for outer in _outward(path))
    ]
    _check_merged(merged)


def _check_bound(path: str, key: str, value: Any) -> None:
    """Raises ValueError: what llguidance makes of it would not hold."""
    if not _is_number(value):
        return
    is_exclusive = key in _EXCLUSIVE
    if key in _UPPER and value >= _MAX_INTEGER + is_exclusive:
        return  # No integer that is written is greater, and other numbers are refused.
    is_exact = abs(value) <= _MAX_WHOLE - is_exclusive
    if not is_exact and not is_exclusive and abs(value) < _MAX_INTEGER:
        read = float(value)
        is_exact = read == value == int(Decimal(repr(read)))
    if not is_exact or isinstance(value, _Misread):
        raise ValueError(f"{path}/{key}: {value!r} would not be kept exactly: 15 digits are")


def _check_multiples(multiples: Iterable[float]) -> None:
    """``multiples``: those that may have to hold together. Raises ValueError: they cannot."""
    numbers = [Decimal(repr(each)) for each in multiples if each]
    if math.lcm(*map(_digits, filter(None, multiples))) > _MAX_MULTIPLE:
        raise ValueError(f"multipleOf of allOf or $ref have too large a multiple: {TOO_LONG}")
    unit = Decimal(10) ** min((int(each.as_tuple().exponent) for each in numbers), default=0)
    if len(numbers) > 1 and math.lcm(*(int(each / unit) for each in numbers)) > (
        _MAX_COMMON_MULTIPLE
    ):
        raise ValueError(
            f"multipleOf of allOf or $ref: {min(numbers)} and {max(numbers)} would not be kept "
            "together exactly"
        )


def _check_merged(references: Sequence[tuple[str, str]]) -> None:
    """``references``: those whose targets are merged with other schemas, and compiled as often as
    they can be reached. Raises ValueError: that is too often."""
    leads: defaultdict[str, list[str]] = defaultdict(list)
    targets = {"", *(target for _, target in references)}
    for path, target in references:
        for outer in _outward(path):
            if outer in targets:
                leads[outer].append(target)
    known: dict[str, int] = {}

    def number(target: str) -> int:
        if target not in known:
            known[target] = 1  # Where it leads back to itself.
            known[target] = 1 + sum(map(number, leads[target]))
        return known[target]

    if max(map(number, sorted(targets))) > _MAX_MERGED:
        raise ValueError(f"references are merged more than {_MAX_MERGED} times: {TOO_LONG}")


def _check_target(target: str) -> None:
    """Raises ValueError: a reference leads into a value, which is not read as a schema here."""
    is_name = False
    for step in target.rpartition("#")[2].split("/")[1:]:
        if not is_name and step in _VALUES:
            raise ValueError(f"$ref to {target!r}: {step} holds no schema")
        is_name = not is_name and step in _NAMES


def _check_references(paths: Iterable[str], references: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError: they lead too deep. A target is one level, and one more for each step down
    to what refers on."""
    targets = {"", *(target for _, target in references)}
    levels = dict.fromkeys(targets, 1)
    leads: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        for number, outer in enumerate(_outward(path), 1):
            if outer in levels:
                levels[outer] = max(levels[outer], number)
    for path, target in references:
        for outer in _outward(path):
            if outer in levels:
                leads[outer].add(target)
    deepest = levels[""]
    for target in targets:
        if target and not target.startswith("/"):
            # Where it leads is not known: it counts as deep as all.
            levels[target] = deepest
            leads[target].add(target)
    check_chain(levels, leads)


def _outward(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path[: path.rindex("/")]
    yield path


def _add_patterns(patterns: Iterable[Any], work: Work) -> None:
    """Those of names in one object are compared by twos, and with its properties."""
    texts = [each for each in patterns if isinstance(each, str)]
    for each in texts:
        regex_size(each, work).add_to(work)
    pairs = len(texts) * (len(texts) - 1) // 2
    work.add("pairs of patternProperties", _PAIR * pairs, number=pairs)


class _Together:
    """Patterns that one text must match, by the place of its schema without any ``allOf``."""

    def __init__(self) -> None:
        self._patterns: Counter[str] = Counter()
        self._of_any_name: Counter[str] = Counter()
        self._references: defaultdict[str, list[str]] = defaultdict(list)
        self._known: dict[tuple[str, int], int] = {}

    def add_pattern(self, path: str) -> None:
        path = _ALL_OF.sub("", path)
        if _ANY_NAME.search(path):
            self._of_any_name[_NAMED.sub("/*", path)] += 1
        else:
            self._patterns[path] += 1

    def add_reference(self, path: str, target: str) -> None:
        self._references[_ALL_OF.sub("", path)].append(_ALL_OF.sub("", target))

    def most(self) -> int:
        places = self._patterns.keys() | self._references.keys() | self._of_any_name.keys()
        return max(map(self._number, places), default=0)

    def _number(self, path: str, depth: int = _MAX_REFERENCES) -> int:
        """Those at ``path``, with those that it refers to."""
        if path and not path.startswith("/"):  # It is not known where it leads.
            return self._patterns.total() + self._of_any_name.total()
        if (path, depth) not in self._known:
            targets = self._references.get(path, ()) if depth else ()
            referred = sum(self._number(target, depth - 1) for target in targets)
            of_any_name = self._of_any_name[_NAMED.sub("/*", path)]
            self._known[path, depth] = self._patterns[path] + of_any_name + referred
        return self._known[path, depth]


def _check_values(path: str, value: Any) -> int:
    """What the objects and lists in values take. Raises ValueError: a number is not exact."""
    waiting = [value]
    num_nested = -1
    while waiting:
        each = waiting.pop()
        num_nested += isinstance(each, list | dict)
        if isinstance(each, list | dict):
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, _Misread) or (
            isinstance(each, int | float) and abs(each) > _MAX_WHOLE
        ):
            raise ValueError(f"{path}: {each!r} would not be written exactly: 15 digits are")
    return max(0, num_nested) * 3


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(value: float) -> int:
    """A number's digits as an integer: 25 for 0.25."""
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Every keyword and its value, behind the pointer to its schema."""
    for path, each in _schemas(schema):
        yield from ((path, key, value) for key, value in each.items())


def _schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that is an object, behind the pointer to it."""
    waiting = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}/{index}", each) for index, each in enumerate(value)][::-1]
        elif isinstance(value, dict):
            yield path, value
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
