"""Rewrites JSON schemas in the keywords of draft 2020-12, and without formats that are annotations.

llguidance decides by ``$schema``, ``items`` and ``additionalItems`` which draft a schema is in, and
then ignores keywords of other drafts. Clients mix drafts, so each keyword counts here, whatever
``$schema`` says. Keywords that contradict each other are refused.
"""

import json
from collections.abc import Iterator
from typing import Any

NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is an object with names as keys and schemas as values."""
VALUES = frozenset({"enum", "const", "default", "examples", "required", "x-guidance"})
"""Keywords whose values are not schemas."""
_SAID_ONLY = frozenset(
    {"$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentMediaType", "contentEncoding"}
)
"""Keywords that do not change what is valid."""
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
"""The formats that llguidance enforces. It refuses others, which are treated as annotations."""
_DRAFT_3 = {"divisibleBy": "multipleOf", "extends": "allOf", "disallow": "not"}
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def is_annotation(key: str, value: Any) -> bool:
    """Whether a keyword with this value does not restrict the valid values."""
    is_unknown_format = key == "format" and isinstance(value, str) and value not in _FORMATS
    return is_unknown_format or key in _SAID_ONLY or key.startswith("x-")


def settled(schema: Any) -> Any:
    """``schema``, or a rewritten copy if something has to be.

    Raises:
        ValueError: Keywords of two drafts contradict each other, or one is not supported.
    """
    if any(list(_rewritten(path, each)) != list(each) for path, each in schemas(schema)):
        schema = json.loads(json.dumps(schema))
        for path, each in schemas(schema):
            new = _rewritten(path, each)
            each.clear()
            each.update(new)
    return schema


def _rewritten(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    """One schema without those in it."""
    _check(path, schema)
    new: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$schema" or (key == "format" and is_annotation(key, value)):
            continue
        if key == "additionalItems":
            continue  # It only says something beside a list of items.
        if key == "items" and isinstance(value, list) and "additionalItems" in schema:
            # llguidance reads them together if no other keyword is between them.
            new |= {"items": value, "additionalItems": schema["additionalItems"]}
        elif isinstance(value, bool) and key in _BOUNDS:
            if value:
                new[key] = schema[_BOUNDS[key]]
        elif key == "$id" and isinstance(value, str) and value.startswith("#"):
            new["$anchor"] = value[1:]
        elif not any(schema.get(bound) is True for bound, of in _BOUNDS.items() if of == key):
            new[key] = value
    return new


def _check(path: str, schema: dict[str, Any]) -> None:
    """Raises ValueError if keywords of ``schema`` are not supported together."""
    if isinstance(schema.get("items"), list) and "prefixItems" in schema:
        raise ValueError(
            f"{path}/prefixItems: a list of items, its name in older drafts, is beside it: "
            "leave one of them out"
        )
    for key, bound in _BOUNDS.items():
        if schema.get(key) is True and bound not in schema:
            raise ValueError(f"{path}/{key}: true needs {bound} beside it, or write the bound")
    if schema.get("required") is True and "type" in schema:
        raise ValueError(
            f"{path}/required: true is not supported: list the names in the object's required"
        )
    for key, remedy in _DRAFT_3.items():
        if key in schema and "/x-" not in path:
            raise ValueError(f"{path}/{key}: is not supported: write {remedy}")


def schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that is an object, with the JSON pointer to it."""
    waiting = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}/{index}", each) for index, each in enumerate(value)][::-1]
        elif isinstance(value, dict):
            yield path, value
            for key, each in reversed(value.items()):
                if key in NAMES and isinstance(each, dict):
                    waiting += [
                        (f"{path}/{key}/{_escaped(name)}", one)
                        for name, one in reversed(each.items())
                    ]
                elif key not in VALUES:
                    waiting.append((f"{path}/{_escaped(key)}", each))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
