"""Converts the calls of a checkpoint's response template to an entry of the table of formats.

If an entry of `TOOL_FORMATS` is equal, it is used: it has the whitespace that models write, which a
template leaves open. Otherwise the template becomes a new entry. In both cases our parser reads the
calls and our grammar writes them.
"""

import re
from collections.abc import Iterable
from typing import Any

from quire.cluster.dialects.formats import (
    TOOL_FORMATS,
    Arguments,
    Braces,
    CallObject,
    Fields,
    Keywords,
    Literal,
    Name,
    Part,
    Shape,
    Spaces,
    ToolFormat,
)
from quire.cluster.dialects.tools import NAME_CHARS
from quire.worker.request.errors import UnreadableTemplate
from quire.worker.text.reasoning import reasoning_from
from quire.worker.text.template.response_template import (
    Field,
    Gap,
    Group,
    Sequence,
    check_rest,
    fields_of,
    sequence_of,
    text_of,
)

_ANY_TEXT = {".*?", r"[\s\S]*?", "[^<]*", "[^<]*?"}
"""Patterns of an argument that extends up to the text that closes it."""
_MAX_QUOTE_CHARS = 32


def calls_from(template: object) -> ToolFormat:
    """The format of calls that a response template describes.

    Raises:
        UnreadableTemplate: It has no calls, or the table cannot express their format.
    """
    fields = fields_of(template)
    field = fields.get("tool_calls")
    if field is None:
        raise UnreadableTemplate("it has no field tool_calls")
    framed = _framed(template, field)
    if framed is not None:
        return framed
    check_rest(fields)
    found = ToolFormat(
        name="response_template", opens=_markers(field), shapes=(_shape(field),), signs=()
    )
    return next((each for each in TOOL_FORMATS if _is_same(each, found)), found)


def _framed(template: object, field: Field) -> ToolFormat | None:
    """The format with the frame of the template's reasoning, if the calls are in that frame too."""
    try:
        frame = reasoning_from(template).frame
    except UnreadableTemplate:
        return None
    opens = str(field.given.get("open_pattern")).replace("\\", "")
    if frame is None or frame.function not in opens or frame.message not in opens:
        return None
    return next((each for each in TOOL_FORMATS if each.frame == frame), None)


def _markers(field: Field) -> tuple[str, ...]:
    return tuple(_marker(field, sequence).strip() for sequence in field.delimiters("open"))


def _marker(field: Field, opening: Sequence) -> str:
    """The text with which a delimiter begins."""
    text = next((part for part in opening if not isinstance(part, Gap)), None)
    # A marker that is part of JSON would have to be read twice.
    if not isinstance(text, str) or not text.strip() or text.strip().startswith("{"):
        raise field.refused("open", field.given.get("open", field.given.get("open_pattern")))
    return text


def _shape(field: Field) -> Shape:
    openings = field.delimiters("open")
    if not openings:
        raise UnreadableTemplate("nothing opens tool_calls")
    opening, (is_followed, closing) = openings[0], _closing(field)
    marker = _marker(field, opening)
    space = marker[len(marker.rstrip()) :]
    head: list[Part] = [Literal(space)] if space else []
    head += _parts(field, opening[opening.index(marker) + 1 :])
    tail, end = _parts(field, closing[:-1]), "".join(map(str, closing[-1:]))
    is_list = bool(field.given.get("transform_each"))
    if is_list == bool(field.given.get("repeats")):
        raise UnreadableTemplate("tool_calls is no list by either repeats or transform_each")
    body = _body(field, head, is_list=is_list)
    if is_list:
        if tail or Name() in head:
            raise field.refused("transform_each", True)
        begin = "".join(part.text for part in head if isinstance(part, Literal))
        return Shape(begin=f"{begin}[", call=body, between=", ", end=f"]{end}")
    gap = "\n" if is_followed or opening[0] == Gap() else ""
    return Shape(call=(*head, *body, *tail), gap=gap, end=end)


def _closing(field: Field) -> tuple[bool, Sequence]:
    """Whether whitespace may follow a call's closing delimiter, and that delimiter without
    whitespace."""
    if not field.delimiters("close"):
        return False, ()
    given = field.delimiter("close")
    if any(isinstance(part, Group) for part in given):
        raise field.refused("close_pattern", field.given.get("close_pattern"))
    closing = given[given[0] == Gap() : len(given) - (given[-1] == Gap())]
    return given[-1] == Gap(), closing


def _parts(field: Field, sequence: Iterable[str | Gap | Group]) -> list[Part]:
    parts: list[Part] = []
    for part in sequence:
        match part:
            case str():
                if parts[-1:] == [Name()] and re.match(f"[{NAME_CHARS}]", part):
                    raise field.refused("open_pattern", field.given.get("open_pattern"))
                parts.append(Literal(part))
            case Gap():
                parts.append(Spaces())
            case Group(name):
                if f"{{{name}}}" != _places(field)[0] or Name() in parts:
                    raise field.refused("open_pattern", field.given.get("open_pattern"))
                parts.append(Name())
    return parts


def _body(field: Field, head: list[Part], *, is_list: bool) -> tuple[Part, ...]:
    """The parts between the delimiters; for a list, those of each call."""
    name, arguments = _places(field)
    is_named = Name() in head and arguments == "{content}"
    match field.content:
        case "json" if is_list:
            _check_arguments(field, ())
            if "." not in name + arguments:
                return (CallObject(arguments[1:-1], name[1:-1]),)
        case "python-call-list" if is_list and (name, arguments) == ("{name}", "{arguments}"):
            _check_arguments(field, ())
            return (Name(), Literal("("), Keywords())
        case "json" if is_named and {"unquoted_keys", "string_delims"} & field.arguments.keys():
            return (_braces(field),)
        case "json" if is_named:
            _check_arguments(field, ("allow_non_json",))
            return (Spaces(), Arguments(), Spaces())
        case "json" if name.startswith("{content.") and arguments.startswith("{content."):
            _check_arguments(field, ())
            keys = [place[len("{content.") : -1] for place in (arguments, name)]
            if not any("." in key for key in keys):
                return (Spaces(), CallObject(*keys), Spaces())
        case "xml-inline" if is_named and not is_list:
            return (_fields(field),)
    raise field.refused("content", (field.content, field.given.get("transform")))


def _places(field: Field) -> tuple[str, str]:
    """The placeholders of name and arguments."""
    transform = field.given.get("transform")
    if isinstance(transform, dict) and transform.keys() <= {"type", "function"}:
        function = transform.get("function")
        if function == "{content}":
            return "{content.name}", "{content.arguments}"
        if isinstance(function, dict) and function.keys() == {"name", "arguments"}:
            name, arguments = function["name"], function["arguments"]
            if all(isinstance(each, str) and each[:1] == "{" for each in (name, arguments)):
                return name, arguments
    raise field.refused("transform", transform)


def _braces(field: Field) -> Braces:
    given = field.arguments
    _check_arguments(field, ("unquoted_keys", "string_delims", "allow_non_json"))
    delimiters = given.get("string_delims")
    match delimiters:
        case [[str(quote), str(close)]] if quote == close and given.get("unquoted_keys") is True:
            if quote.strip() and len(quote) <= _MAX_QUOTE_CHARS:
                return Braces(quote)
    raise field.refused("content_args", dict(given))


def _fields(field: Field) -> Fields:
    _check_arguments(field, ("tag_pattern", "value_parser"))
    given: dict[str, Any] = dict(field.arguments)
    match given.get("value_parser"):
        case None | {"name": "text"} | {"name": "json", "args": {"allow_non_json": True}}:
            pass
        case other:
            raise field.refused("content_args.value_parser", other)
    pattern = given.get("tag_pattern")
    parts = sequence_of(pattern, place="tool_calls.content_args.tag_pattern")
    groups = [part for part in parts if isinstance(part, Group)]
    if [group.name for group in groups] == ["key", "value"] and groups[1].pattern in _ANY_TEXT:
        at, behind = parts.index(groups[0]), parts.index(groups[1])
        between = "".join(
            part if isinstance(part, str) else "\n" for part in parts[at + 1 : behind]
        )
        first, last = text_of(parts[:at]), text_of(parts[behind + 1 :])
        texts = between.split()
        if first and last and 1 <= len(texts) <= 2:
            before, after = parts[behind - 1], parts[behind + 1]
            is_on_lines = before == Gap() or str(before).endswith("\n")
            is_on_lines = is_on_lines and (after == Gap() or str(after).startswith("\n"))
            return Fields((first, texts[0]), ("".join(texts[1:]), last), newline=is_on_lines)
    raise field.refused("content_args.tag_pattern", pattern)


def _check_arguments(field: Field, known: tuple[str, ...]) -> None:
    for name, value in field.arguments.items():
        if name not in known:
            raise field.refused(f"content_args.{name}", value)


def _is_same(known: ToolFormat, found: ToolFormat) -> bool:
    """Whether both formats write the same except for whitespace."""
    if known.frame is not None or known.is_bare:  # A template's calls have a marker.
        return False
    (known_between, known_parts), (between, parts) = _outline(known), _outline(found)
    end, known_end = parts.pop(), known_parts.pop()
    if (known_between, known_parts) != (between, parts):
        return False
    if isinstance(parts[-1], Fields):  # Templates skip text that is not an argument.
        return bool(end) and str(known_end).endswith(str(end))
    return end in (known_end, *(f"{known_end}{close}" for close in known.closes))


def _outline(form: ToolFormat) -> tuple[str | None, list[str | Part]]:
    """The text between two calls, and the parts of a call without whitespace, with a text on either
    side of each part."""
    shape = form.shapes[0]
    outline: list[str | Part] = [""]
    for part in (Literal(form.opens[0] + shape.begin), *shape.call, Literal(shape.end)):
        match part:
            case Spaces():
                pass
            case Literal(text):
                outline[-1] = str(outline[-1]) + "".join(text.split())
            case Fields(key, value):
                outline += [Fields((key[0], key[1] + value[0]), ("", value[1])), ""]
            case _:
                outline += [part, ""]
    between = shape.between.strip() if shape.between is not None else None
    return (None if between == form.opens[0] else between), outline
