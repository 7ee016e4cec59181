"""Grammars for answers that must be tool calls, or whose calls must fit their schemas.

They follow the same table as the parser, in Lark's syntax with llguidance's extensions. Special
tokens are written by token id, since their text alone does not produce them.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.cluster.dialects.dialect import Dialect
from quire.cluster.dialects.formats import (
    Arguments,
    Braces,
    CallObject,
    Fields,
    Given,
    Keywords,
    Literal,
    Name,
    Number,
    Part,
    Shape,
    Spaces,
    ToolFormat,
)
from quire.cluster.dialects.tools import Tool, ToolUse
from quire.cluster.dialects.values import kinds_of, resolved
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.json_schema_drafts import is_annotation
from quire.worker.text.grammar.lark import ANYTHING, Lark

_OF_OBJECTS = ("properties", "required", "additionalProperties")
_MAX_DEPTH = 8


def constrain(
    dialect: Dialect, use: ToolUse, form: Constraint | None, *, reasons: bool | None
) -> Constraint | None:
    """The constraint on an answer under which both ``use`` and ``form`` hold. ``form``, if given,
    applies to an answer without calls.

    ``reasons``: true if the prompt has begun the reasoning, false if it has ended it, ``None`` if
    it leaves that to the model. The reasoning itself is not constrained.

    Raises:
        InvalidRequest: The two cannot hold together, or a schema cannot be written in the model's
            format of calls.
    """
    if form is not None and form.kind != "json_schema":
        if use.has_form:
            raise InvalidRequest(
                f"a {form.kind} as the form of the output cannot be had with tool_choice "
                "'required' or a named function, or with strict tools: leave one of them out",
                param="structured_outputs",
            )
        return form  # It covers the whole answer.
    may_call = bool(use.tools) and dialect.calls is not None
    if form is not None and may_call and not use.is_required and _is_json(dialect.calls):
        # The grammar's lexer would need look-ahead to distinguish a call from the JSON answer.
        if use.has_form:
            raise InvalidRequest(
                "response_format cannot be had with strict tools of this model, whose calls are "
                "JSON without a mark: leave one of them out",
                param="response_format",
            )
        may_call = False
    around = dialect.calls.around if dialect.calls is not None else None
    is_marked = around is not None or (dialect.reasoning is not None and reasons is not False)
    if form is not None and not may_call and not is_marked:
        return form
    if form is None and not use.has_form:
        return None
    grammar = Lark(dialect.special_tokens)
    reasoning = dialect.reasoning
    plain = None
    if form is not None and not use.is_required:
        try:
            plain = grammar.json(json.loads(form.text))
        except ValueError:
            return form  # Not JSON: refused as it is.
        if reasoning is not None and reasoning.frame is not None:
            plain = f"{grammar.text(reasoning.frame.answer)} {plain}"
        if dialect.calls is not None:
            plain = f"{_begin_of_text(grammar, dialect.calls)} {plain}"
    answer = plain if plain and not may_call else _calls(grammar, dialect, use, plain)
    if reasoning is not None and reasons is not False:
        rest = f"{grammar.until(reasoning.closes)} /\\s{{0,4}}/"
        if reasoning.frame is not None:
            rest = f"{grammar.until(reasoning.closes)} {grammar.text(reasoning.frame.reopens)}"
        if dialect.calls is not None and around is not None and dialect.calls.is_bare:
            rest = f"{rest} {grammar.text(dialect.calls.opens[0])}"
        if reasons:
            answer = f"{rest} {answer}"
        else:
            answer = f"({grammar.text(reasoning.opens)} {rest})? {answer}"
    return Constraint("grammar", grammar.written(answer))


def _is_json(calls: ToolFormat | None) -> bool:
    """Whether a call begins like any JSON object."""
    if calls is None or not calls.is_bare or calls.shapes[0].begin:
        return False
    return isinstance(calls.shapes[0].call[0], CallObject)


def _begin_of_text(grammar: Lark, calls: ToolFormat) -> str:
    """The mark before text that is not a call. If calls have a marker, the prompt may already have
    it."""
    if calls.around is None or not calls.around.opens:
        return ""
    mark = grammar.text(calls.around.opens)
    return mark if calls.is_bare else f"({mark})?"


def _calls(grammar: Lark, dialect: Dialect, use: ToolUse, form: str | None) -> str:
    """A rule for calls. ``form``: the form of an answer that is not a call."""
    calls = dialect.calls
    assert calls is not None, "checked before"
    opener = "" if calls.is_bare else calls.opens[0]
    shape = calls.shapes[0]
    tools = [_call(grammar, shape, tool, use, calls.id_chars) for tool in use.tools]
    call = grammar.rule(" | ".join(tools))
    # Whitespace after a marker belongs to the next token of some models, and not of others.
    num_spaces = len(shape.begin) - len(shape.begin.lstrip())
    space = f"/[ \\n]{{0,{num_spaces}}}/" if num_spaces else ""
    begin = f"{space} {grammar.text(shape.begin.lstrip())}".strip()
    if shape.between is None:  # Each call has its own marker.
        section = f"{begin} {call} {grammar.text(shape.end)}".strip()
        again = f"{grammar.text(shape.gap + opener)} {section}"
    else:
        section, again = call, f"{grammar.text(shape.between)} {call}"
    if use.is_parallel:
        section = f"{section} ({again})*"
    if shape.between is not None:
        section = f"{begin} {section} {grammar.text(shape.end)}".strip()
    begun = f"{grammar.text(opener)} {section}".strip()
    if not calls.is_bare and calls.around is not None and calls.around.opens:  # Text may be empty.
        ends = "".join(f"({grammar.text(each)})? " for each in calls.around.closes[:1])
        begun = f"{_begin_of_text(grammar, calls)} {ends} {begun}"
    if use.is_required:
        return begun
    if form is not None:
        return f"({begun} | {form})"
    plain = _plain(grammar, calls)
    if calls.frame is not None:
        return f"({grammar.text(opener)} {section} | {grammar.text(calls.frame.answer)} {plain})"
    if calls.is_bare:
        return f"({section} | {plain})"
    return f"({grammar.until(opener)} {section})? {plain}"


def _plain(grammar: Lark, calls: ToolFormat) -> str:
    """A rule for text that is not a call."""
    if calls.is_bare and calls.around is not None:
        return f"{_begin_of_text(grammar, calls)} {grammar.without(calls.opens[0])}"
    if not calls.is_bare:
        return grammar.without(calls.opens[0])
    first = "\\[" if calls.shapes[0].begin else "{"
    return grammar.terminal(f"/([^\\s{first}]{ANYTHING})?/")


def _call(grammar: Lark, shape: Shape, tool: Tool, use: ToolUse, id_chars: int) -> str:
    """A rule for one call of ``tool``."""
    schema = dict(tool.parameters) if tool.is_strict or use.is_required else {}
    if not schema:  # Only the arguments' names are known.
        tool = replace(tool, parameters=_untyped(tool.parameters))
    schema.setdefault("type", "object")
    parts = [_part(grammar, part, tool, schema, id_chars) for part in shape.call]
    return " ".join(part for part in parts if part)


def _untyped(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that keeps only the arguments' names and types."""
    properties = parameters.get("properties")
    names = properties if isinstance(properties, dict) else {}
    kinds = {name: kinds_of(name, parameters) for name in names}
    return {"properties": {n: {"type": sorted(k)} if k else {} for n, k in kinds.items()}}


def _part(grammar: Lark, part: Part, tool: Tool, schema: dict[str, Any], id_chars: int) -> str:
    match part:
        case Literal(text):
            return grammar.text(text)
        case Spaces():
            return "/[ \\n]{0,2}/"
        case Name():
            return grammar.text(tool.name)
        case Number():
            return "/[0-9]{1,4}/"
        case Given(mark):  # An id behind a mark may be missing.
            return "" if mark else f"/[0-9A-Za-z]{{{id_chars}}}/"
        case Arguments():
            return grammar.json(schema)
        case CallObject(arguments, name):
            keys = json.dumps(name), json.dumps(arguments)
            head = grammar.text(f"{{{keys[0]}: {json.dumps(tool.name)}, {keys[1]}: ")
            return f"{head} {grammar.json(schema)} {grammar.text('}')}"
        case Fields():
            return _fields(grammar, part, tool)
        case Keywords():
            return _keywords(grammar, tool)
        case Braces(quote):
            return _Braced(grammar, quote, tool).object_of(tool.parameters)


def _fields(grammar: Lark, part: Fields, tool: Tool) -> str:
    newline = "\n" if part.newline else ""
    fields = []
    for name, schema, is_required in _properties(tool):
        kinds = kinds_of(name, tool.parameters)
        head = part.key[0] + name + part.key[1]
        if part.attribute is not None:
            kind = min(kinds or ("string",)).replace("integer", "number")
            head += part.attribute.get(kind, part.attribute["string"]) + part.value[0]
        elif part.value[0]:
            head += f"\n{part.value[0]}"
        close = f"{newline}{part.value[1]}"
        texts = _texts(schema)
        if texts is not None:
            value = " | ".join(grammar.text(f"{text}{close}") for text in texts)
        elif kinds is None or "string" in kinds:
            if schema.get("type") == "string":
                _check_free(tool, name, schema)
            value = grammar.until_line(part.value[1]) if newline else grammar.until(close)
        else:
            choices = [grammar.json(schema), *map(grammar.text, _constants(schema))]
            value = f"({' | '.join(choices)}) {grammar.text(close)}"
        field = f"{grammar.text(head + newline)} ({value}) {grammar.text(part.gap)}".rstrip()
        fields.append(f"({field})" if is_required else f"({field})?")
    return " ".join(fields)


def _keywords(grammar: Lark, tool: Tool) -> str:
    """A rule for the keyword arguments and the closing parenthesis."""
    values = [
        (f"{grammar.text(f'{name}=')} {grammar.json(schema)}", is_required)
        for name, schema, is_required in _properties(tool)
    ]
    return _listed(grammar, values, comma=", ", close=")")


def _listed(grammar: Lark, values: Sequence[tuple[str, bool]], *, comma: str, close: str) -> str:
    """A rule for a list of values, of which some are required, and the text that closes it."""
    rest = first = grammar.text(close)
    for value, is_required in reversed(values):
        begun = f"{value} {rest}"
        later = f"{grammar.text(comma)} {begun}"
        first = grammar.rule(begun if is_required else f"{begun} | {first}")
        rest = grammar.rule(later if is_required else f"{later} | {rest}")
    return first


class _Braced:
    """Rules for values in the form of `Braces`, by their schemas."""

    def __init__(self, grammar: Lark, quote: str, tool: Tool) -> None:
        self._grammar = grammar
        self._tool = tool
        self._quote = grammar.text(quote)
        self._text = f"{self._quote} {grammar.until(quote)}"

    def object_of(
        self, schema: Mapping[str, Any], *, at: str = "", num_left: int = _MAX_DEPTH
    ) -> str:
        # Models write names in alphabetical order, like Jinja's `dictsort`.
        properties = schema.get("properties")
        required = schema.get("required")
        values = []
        listed = (properties if isinstance(properties, dict) else {}).items()
        for name, each in sorted(listed, key=lambda item: item[0].lower()):
            value = self._value(each, at=f"{at}{name}", num_left=num_left)
            is_required = isinstance(required, list) and name in required
            values.append((f"{self._grammar.text(f'{name}:')} {value}", is_required))
        return f"{self._grammar.text('{')} {_listed(self._grammar, values, comma=',', close='}')}"

    def _value(self, schema: Any, *, at: str, num_left: int) -> str:
        if not isinstance(schema, dict) or not num_left:
            return self._anything()
        if "$ref" in schema:
            found = resolved(schema["$ref"], self._tool.parameters)
            return self._value(found, at=at, num_left=num_left - 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return self._any_of(
                f"{self._quote} {self._grammar.text(value)} {self._quote}"
                if isinstance(value, str)
                else self._grammar.text(json.dumps(value))
                for value in values
            )
        choices = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(choices, list) and choices:
            return self._any_of(self._value(each, at=at, num_left=num_left - 1) for each in choices)
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds:
            return self._anything()
        return self._any_of(self._of_kind(kind, schema, at, num_left) for kind in kinds)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], at: str, num_left: int) -> str:
        if kind == "null":
            return '("None" | "null")'  # The form of Jinja templates, and JSON's.
        if kind in ("integer", "number", "boolean"):
            return self._grammar.json({**schema, "type": kind})
        known = {"string": (), "array": ("items",), "object": _OF_OBJECTS}
        _check_free(self._tool, at, schema, also=known.get(kind, ()))
        if kind == "string":
            return self._text
        if kind == "array":
            item = self._value(schema.get("items"), at=f"{at}[]", num_left=num_left - 1)
            return _list_of(item)
        if "properties" in schema:
            return self.object_of(schema, at=f"{at}.", num_left=num_left - 1)
        self._anything()
        return _OBJECT_OF_ANYTHING

    def _any_of(self, choices: Iterable[str]) -> str:
        return self._grammar.rule(" | ".join(dict.fromkeys(choices)))

    def _anything(self) -> str:
        scalar = self._grammar.json({"type": ["number", "boolean"]})
        choices = (self._text, scalar, '"None" | "null"', _list_of(_ANYTHING), _OBJECT_OF_ANYTHING)
        return self._grammar.rule(" | ".join(choices), name=_ANYTHING)


def _list_of(item: str) -> str:
    return f'"[" ({item} ("," {item})*)? "]"'


_ANYTHING = "anything"
_PAIR = r'/[^\s:,{}\[\]"<]{1,64}/ ":" ' + _ANYTHING
_OBJECT_OF_ANYTHING = f'"{{" ({_PAIR} ("," {_PAIR})*)? "}}"'


def _properties(tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required, for each argument."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    found = []
    for name, schema in (properties if isinstance(properties, dict) else {}).items():
        shared = {
            key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
        }
        is_required = isinstance(required, list) and name in required
        found.append((name, {**schema, **shared} if isinstance(schema, dict) else {}, is_required))
    return found


def _texts(schema: Mapping[str, Any]) -> Sequence[str] | None:
    """The possible texts of an argument that has only a few."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def _constants(schema: Mapping[str, Any]) -> Sequence[str]:
    """Constants that Jinja templates write in Python's form."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return [
        *(("True", "False") if "boolean" in kinds else ()),
        *(("None",) if "null" in kinds else ()),
    ]


def _check_free(
    tool: Tool, name: str, schema: Mapping[str, Any], *, also: Collection[str] = ()
) -> None:
    bound = sorted(
        key
        for key, value in schema.items()
        if key not in ("type", *also) and not is_annotation(key, value)
    )
    if bound:
        raise InvalidRequest(
            f"tools: {bound[0]}, of the argument {name!r} of {tool.name!r}, is not supported in "
            "the format in which this model writes calls: leave it out",
            param="tools",
        )
