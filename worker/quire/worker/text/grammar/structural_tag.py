"""Structural tags: free text in which marked parts are constrained, as in vLLM and SGLang.

Sources: SGLang's and vLLM's documentation for ``structures`` and ``triggers``, and XGrammar's for
``format``. Field names and meanings are theirs.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.worker.text.grammar.lark import ANYTHING, Lark

_MAX_DEPTH = 32


def written(lark: Lark, text: str) -> str:
    """The grammar of the structural tag whose JSON is ``text``. Raises ValueError if invalid."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("it must be an object")
    if "structures" in given:
        tags = [
            {
                "begin": _get(each, "begin", str),
                "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
                "end": _get(each, "end", str),
            }
            for each in _get(given, "structures", list)
        ]
        triggers = _get(given, "triggers", list)
        given = {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
    return lark.written(_format(lark, _get(given, "format", dict), depth=0))


def _format(lark: Lark, given: Mapping[str, Any], *, depth: int) -> str:
    kind = _get(given, "type", str)
    if kind not in _WRITERS:
        raise ValueError(f"type={kind!r} is not one of {', '.join(_WRITERS)}")
    if depth > _MAX_DEPTH:
        raise ValueError(f"formats are nested deeper than {_MAX_DEPTH}")
    return lark.rule(_WRITERS[kind](lark, given, depth + 1))


def _schema(lark: Lark, given: Mapping[str, Any], depth: int) -> str:
    schema = given.get("json_schema")
    return lark.json(json.loads(schema) if isinstance(schema, str) else schema)


def _pattern(given: Mapping[str, Any]) -> str:
    """The given regular expression, with ``/`` escaped."""
    pattern = _get(given, "pattern", str)
    if not re.fullmatch(r"(?:\\.|[^\\])+", pattern, re.DOTALL):
        raise ValueError(f"pattern={pattern!r} is empty, or ends with half an escape")
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def _sequence(lark: Lark, given: Mapping[str, Any], depth: int) -> str:
    elements = _formats(given, "elements")
    return " ".join(_format(lark, each, depth=depth) for each in elements)


def _or(lark: Lark, given: Mapping[str, Any], depth: int) -> str:
    elements = _formats(given, "elements")
    return " | ".join(_format(lark, each, depth=depth) for each in elements)


def _tag(lark: Lark, given: Mapping[str, Any], depth: int, *, begun: str = "") -> str:
    """An expression for a tag. ``begun`` is the part of its beginning that is already written."""
    begin = lark.text(_get(given, "begin", str).removeprefix(begun))
    content, end = _get(given, "content", dict), _get(given, "end", str)
    if content.get("type") == "any_text" and end:
        return f"{begin} {lark.until(end)}"
    return f"{begin} {_format(lark, content, depth=depth)} {lark.text(end)}"


def _triggered_tags(lark: Lark, given: Mapping[str, Any], depth: int) -> str:
    triggers, tags = _get(given, "triggers", list), _formats(given, "tags")
    if not triggers or not all(isinstance(each, str) and each for each in triggers):
        raise ValueError(f"triggers={triggers!r} must be texts, none empty")
    rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for tag in tags:
        begin = _get(tag, "begin", str)
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"begin={begin!r} begins with none of triggers={triggers!r}")
        rests[trigger].append(lark.rule(_tag(lark, tag, depth, begun=trigger)))
    options = {trigger: f"({' | '.join(rest)})" for trigger, rest in rests.items() if rest}
    triggered = lark.rule(
        " | ".join(f"{lark.until(trigger)} {rest}" for trigger, rest in options.items())
    )
    plain = lark.without(*options)
    first = ""
    if given.get("at_least_one"):
        first = f"({' | '.join(f'{lark.text(each)} {rest}' for each, rest in options.items())})"
    if given.get("stop_after_first"):
        return first or f"{triggered} | {plain}"
    return f"{first} {triggered}* {plain}"


def _tags_with_separator(lark: Lark, given: Mapping[str, Any], depth: int) -> str:
    tags = [lark.rule(_tag(lark, tag, depth)) for tag in _formats(given, "tags")]
    one = f"({' | '.join(tags)})"
    separator = lark.text(_get(given, "separator", str))
    several = one if given.get("stop_after_first") else f"{one} ({separator} {one})*"
    return several if given.get("at_least_one") else f"({several})?"


def _formats(given: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    formats: list[Mapping[str, Any]] = _get(given, name, list)
    if not formats or not all(isinstance(each, dict) for each in formats):
        raise ValueError(f"{name} must be a list of objects, not empty")
    return formats


def _get(given: Any, name: str, kind: type) -> Any:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} must be {_KINDS[kind]}")
    return value


_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "an object"}

_Writer = Callable[[Lark, Mapping[str, Any], int], str]
_WRITERS: Mapping[str, _Writer] = {
    "const_string": lambda lark, given, depth: lark.text(_get(given, "value", str)),
    "json_schema": _schema,
    "any_text": lambda lark, given, depth: lark.terminal(f"/{ANYTHING}/"),
    "regex": lambda lark, given, depth: lark.terminal(f"/{_pattern(given)}/"),
    "sequence": _sequence,
    "or": _or,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
}
