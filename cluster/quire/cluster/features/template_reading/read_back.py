"""Derives the format of tool calls from what a chat template renders.

The template renders a call with known name and arguments, and then it together with another one.
The texts around names and arguments are the format. It is kept only if the parser, using it, reads
the rendered texts back to the same calls and nothing else.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quire.cluster.dialects.events import CallArguments, CallBegun, CallEnded, Content, Event
from quire.cluster.dialects.formats import (
    Arguments,
    Around,
    CallObject,
    Fields,
    Given,
    Keywords,
    Literal,
    Name,
    Number,
    Part,
    Shape,
    ToolFormat,
)
from quire.cluster.dialects.parser import OutputParser
from quire.cluster.features.template_reading.probe import (
    ARGUMENTS,
    FIRST,
    KINDS,
    PARSED_TOOLS,
    SECOND,
    TEXT,
    MarkedCall,
    Shown,
    common_end,
    common_start,
)

_NAME = "the template's own"


def reads(form: ToolFormat, shown: Shown) -> bool:
    """Whether the parser finds exactly the calls that a template rendered. They must have the form
    that the grammar writes: the first shape, each with or without a marker of its own."""
    form = replace(form, shapes=form.shapes[:1])
    has_own_markers = form.shapes[0].between is None and bool(form.opens)
    if shown.both and has_own_markers and shown.both.count(form.opens[0]) < 2:
        return False
    if shown.around is not None:
        said = _read(form, shown.plain)
        if not all(isinstance(each, Content) for each in said):
            return False
        if "".join(getattr(each, "text", "") for each in said).strip() != TEXT:
            return False
    return all(
        _calls_in(form, text) == [(call.name, ARGUMENTS) for call in calls]
        for text, calls in (
            (shown.one, (FIRST,)),
            *(((shown.both, (FIRST, SECOND)),) if shown.both else ()),
        )
    )


def finds(form: ToolFormat, shown: Shown) -> bool:
    """Whether the parser finds a call at all, even if its arguments are not read as JSON."""
    return any(isinstance(event, CallBegun) for event in _read(form, shown.one))


def _read(form: ToolFormat, text: str) -> list[Event]:
    parser = OutputParser(calls=form, tools=PARSED_TOOLS)
    return parser.feed(text) + parser.finish()


def _calls_in(form: ToolFormat, text: str) -> list[tuple[str, Any]] | None:
    parser = OutputParser(calls=form, tools=PARSED_TOOLS)
    events = [event for char in text for event in parser.feed(char)] + parser.finish()
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case CallBegun(_, name):
                names.append(name)
                arguments.append("")
            case CallArguments(_, more):
                arguments[-1] += more
            case Content(said) if said.strip():
                return None
            case CallEnded() | Content():
                pass
            case _:
                return None
    try:
        return list(zip(names, map(json.loads, arguments), strict=True))
    except ValueError:
        return None


def read_back(shown: Shown) -> ToolFormat | None:
    """The format of the rendered calls, if the parser can read them with it."""
    for core in _cores(shown.one, FIRST):
        form = _format(shown, core)
        if form is not None and reads(form, shown):
            return form
    return None


@dataclass(frozen=True)
class _Core:
    """The place of a call in a text, and its parts."""

    begin: int
    end: int
    parts: tuple[Part, ...]


def _cores(text: str, call: MarkedCall) -> Iterator[_Core]:
    """Possible ways to read the call in ``text``."""
    at = text.index(call.name)
    for begin in _indices(text, "{", 0, at):
        value, end = _json_at(text, begin)
        if isinstance(value, dict) and end > at:
            names = [key for key, each in value.items() if each == call.name]
            keys = [key for key, each in value.items() if _is_arguments(each)]
            if names and keys:
                yield _Core(begin, end, (CallObject(keys[0], names[0]),))
    behind = at + len(call.name)
    for number in [each for char in '{"' for each in _indices(text, char, behind, len(text))]:
        value, end = _json_at(text, number)
        if _is_arguments(value):
            yield _with_id(text, at, end, call, _between(text[behind:number], call), Arguments())
            break
    if text.startswith("(", behind) and (end := text.find(")", text.find("quirekeye"))) >= 0:
        yield _Core(at, end + 1, (Name(), Literal("("), Keywords()))
    tagged = _fields(text, behind)
    if tagged is not None:
        head, fields, end = tagged
        yield _with_id(text, at, end, call, _between(head, call), fields)


def _with_id(
    text: str, at: int, end: int, call: MarkedCall, between: tuple[Part, ...], rest: Part
) -> _Core:
    """A call that begins with its name, or with an id before the name."""
    id_at = text.rfind(call.call_id, 0, at)
    if id_at < 0:
        return _Core(at, end, (Name(), *between, rest))
    head = Literal(text[id_at + len(call.call_id) : at])
    return _Core(id_at, end, (Given(), head, Name(), *between, rest))


def _between(text: str, call: MarkedCall) -> tuple[Part, ...]:
    """The parts between name and arguments."""
    if call.name in text:
        before, _, after = text.partition(call.name)
        return (Literal(before), Name(), Literal(after))
    if call.call_id in text:
        before, _, after = text.partition(call.call_id)
        return (Literal(before), Given(), Literal(after))
    counted = re.search(r'(?<=")[01](?=")', text)
    if counted is not None:
        return (Literal(text[: counted.start()]), Number(), Literal(text[counted.end() :]))
    return (Literal(text),) if text else ()


def _fields(text: str, start: int) -> tuple[str, Fields, int] | None:
    """The text before the first argument, the tags of arguments, and where the last argument
    ends."""
    gaps, middles = [], []
    at = start
    for key, value in ARGUMENTS.items():
        found = re.compile(
            f"(?s)(.*?){key}(.*?)({'|'.join(map(re.escape, _written(value)))})"
        ).match(text, at)
        if found is None:
            return None
        gaps.append(found[1])
        middles.append(found[2])
        at = found.end()
    rest = text[at:]
    # Keep only whole tags: the texts around them differ between arguments.
    closes = re.sub(r"<[^>]*$", "", common_start(gaps[1], rest))
    opens = common_end(gaps[0], gaps[1].removeprefix(closes))
    opens = opens[max(opens.find("<"), 0) :]
    if not opens.strip() or not closes.strip():
        return None
    newline = closes.startswith("\n") and all(middle.endswith("\n") for middle in middles)
    head = gaps[0].removesuffix(opens)
    key, end, attribute = middles[0], "", None
    if len(set(middles)) > 1:
        key, end = common_start(*middles), common_end(*middles)
        texts = [middle[len(key) : len(middle) - len(end)] for middle in middles]
        attribute = dict(zip(KINDS.values(), texts, strict=True))
    elif newline:
        key = key.removesuffix("\n")
    gap = gaps[1][len(closes.rstrip()) : len(gaps[1]) - len(opens.lstrip())]
    fields = Fields(
        (opens.lstrip(), key),
        (end, closes.strip()),
        newline=newline and attribute is None,
        attribute=attribute,
        gap=gap,
    )
    return (
        head,
        fields,
        at + len(closes.rstrip()) + len(common_start(gap, rest[len(closes.rstrip()) :])),
    )


def _written(value: object) -> Iterator[str]:
    yield value if isinstance(value, str) else json.dumps(value)
    yield json.dumps(value, separators=(",", ":"))
    yield repr(value)


def _format(shown: Shown, core: _Core) -> ToolFormat | None:
    before, end = shown.one[: core.begin], shown.one[core.end :]
    between: str | None = None
    if shown.both is not None:
        # The second call has the same length as the first: ids and names have equal lengths.
        length = core.end - core.begin
        again = len(shown.both) - len(end) - length
        between = shown.both[core.end : again]
    if any(
        call.call_id in text for call in (FIRST, SECOND) for text in (before, between or "", end)
    ):
        return None
    headed = _headed(shown, core, between or "")
    if headed is not None:
        return headed
    opens, begin = re.fullmatch(r"\s*(\S*)(.*)", before, re.DOTALL).groups()  # type: ignore[union-attr]
    is_bare = not opens.strip("[{")
    if is_bare:
        opens, begin = "", before.lstrip()
        if begin.strip() != "[" and not isinstance(core.parts[0], CallObject):
            return None  # It would begin like any text.
    elif opens.endswith("["):  # Some answers have a space before "[".
        opens, begin = opens.removesuffix("["), f"[{begin}"
    last = between if between is not None else end
    tail = _whole(common_start(last, end))
    shape = Shape(
        begin=begin,
        call=(*core.parts, *((Literal(tail),) if tail.strip() else ())),
        between=between.removeprefix(tail) if between is not None else None,
        end=end.removeprefix(tail).rstrip(),
    )
    return ToolFormat(
        name=_NAME,
        opens=(opens,) if opens else (),
        is_bare=is_bare,
        shapes=(shape,),
        around=shown.around,
        signs=(("tool",),),
        **_ids(shown),
    )


def _headed(shown: Shown, core: _Core, between: str) -> ToolFormat | None:
    """The format if each call and each text is a message of its own, and the prompt has begun the
    first message."""
    marker = _common_piece(shown.prompt, between)
    closes, _, head = between.rpartition(marker) if marker else ("", "", "")
    before, end = shown.one[: core.begin], shown.one[core.end :]
    if not marker or head != before or shown.around is None or not shown.around.opens:
        return None
    tail = _whole(common_start(closes, end))
    closes, end = closes.removeprefix(tail), end.removeprefix(tail)
    parts: tuple[Part, ...] = (*((Literal(before),) if before else ()), *core.parts)
    ends = filter(None, (*shown.around.closes, closes.strip()))
    return ToolFormat(
        name=_NAME,
        opens=(marker,),
        is_bare=True,
        shapes=(
            Shape(
                call=(*parts, *((Literal(tail),) if tail else ())),
                between=closes + marker,
                end=end.rstrip(),
            ),
        ),
        around=Around(opens=shown.around.opens, closes=tuple(dict.fromkeys(ends))),
        signs=(("tool",),),
        **_ids(shown),
    )


def _ids(shown: Shown) -> dict[str, Any]:
    """The properties of ids that the template accepts."""
    return {} if shown.takes_any_id else {"id_prefix": "", "id_chars": 9}


def _common_piece(prompt: str, text: str) -> str:
    """The longest suffix of ``prompt`` that occurs in ``text``, with whole tags only."""
    found = next((prompt[at:] for at in range(len(prompt)) if prompt[at:] in text), "").strip()
    return found[max(found.find("<"), 0) :]


def _whole(text: str) -> str:
    """``text`` without a tag or JSON that begins at its end and continues after it."""
    return re.sub(r"(<[^>]*|[\[{,\s]+)$", "", text)


def _json_at(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, start


def _is_arguments(value: object) -> bool:
    """Whether ``value`` is the arguments, as an object or as JSON text."""
    if isinstance(value, str):
        value, _ = _json_at(value, 0)
    return value == ARGUMENTS


def _indices(text: str, char: str, start: int, end: int) -> Iterator[int]:
    return (at for at in range(start, end) if text[at] == char)
