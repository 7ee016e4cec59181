"""The format of calls that a chat template writes, read back from what it renders.

The template renders a call of known name and arguments, another one, and both. What stands around
names and arguments in the three texts is the format. It is kept only if the parser, with it, reads
all three texts back to the same calls and to nothing else.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.cluster.dialects.formats import (
    Arguments,
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
from quire.cluster.dialects.parser import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    OutputParser,
)
from quire.cluster.dialects.tools import Tool
from quire.worker.api.errors import InvalidRequest

Render = Callable[[list[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""A chat and its tools to their text; raises InvalidRequest where the template refuses."""

_USER = {"role": "user", "content": "?"}
_TEXT = "quiretext"
_ARGUMENTS: dict[str, Any] = {
    "quirekeya": "quirevalue",
    "quirekeyb": 7,
    "quirekeyc": [1, "x"],
    "quirekeyd": True,
    "quirekeye": {"u": 2},
}
_KINDS = {"quirekeya": "string", "quirekeyb": "number", "quirekeyc": "array"} | {
    "quirekeyd": "boolean",
    "quirekeye": "object",
}
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": kind, "description": "?"} for name, kind in _KINDS.items()},
    "required": [*_KINDS],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class _Call:
    name: str
    call_id: str

    @property
    def message(self) -> Mapping[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(_ARGUMENTS)}
        return {"id": self.call_id, "type": "function", "function": function}

    @property
    def tool(self) -> Mapping[str, Any]:
        described = {"name": self.name, "description": "?", "parameters": _SCHEMA}
        return {"type": "function", "function": described}


_FIRST, _SECOND = _Call("quirefna", "quireid01"), _Call("quirefnb", "quireid02")
_TOOLS = [_FIRST.tool, _SECOND.tool]
_PARSED_TOOLS = [
    Tool(name=call.name, parameters=_SCHEMA, spec=call.tool) for call in (_FIRST, _SECOND)
]


@dataclass(frozen=True)
class Shown:
    """What a template writes where it is the model's turn to call."""

    one: str
    """The first call."""
    both: str | None
    """Two calls; ``None`` where it refuses or shows only one."""
    takes_any_id: bool = True
    """Else ids have nine characters."""


def shown_by(render: Render) -> Shown | None:
    """What the template behind ``render`` writes; ``None`` where it shows no calls."""

    def rendered(**message: object) -> str:
        try:
            return render([_USER, {"role": "assistant", **message}], _TOOLS)
        except InvalidRequest:
            return ""

    plain = rendered(content=_TEXT)
    one = rendered(content=None, tool_calls=[_FIRST.message])
    both = rendered(content=None, tool_calls=[_FIRST.message, _SECOND.message])
    long = rendered(content=None, tool_calls=[{**_FIRST.message, "id": "call_" + 24 * "0"}])
    if _TEXT not in plain or not one:
        return None
    behind = plain.partition(_TEXT)[2]
    before = len(_common_start(plain, one))
    cut = one.rfind("<", 0, before)  # Tags are whole, and differ from those around text.
    if cut > one.rfind(">", 0, before):
        before = cut
    after = len(one) - len(_common_end(behind, one))
    if one.rfind("<", before, after) > one.rfind(">", before, after):
        after = one.find(">", after) + 1
    if _FIRST.name not in one[before:] or _tags(_common_start(behind, one[before:])):
        return None  # Text is framed, too, and the parser could not tell where it ends.
    # A mark that ends both the calls and other parts belongs to the calls.
    while (tag := re.match(r"<[^<>\s]*>", one[after:])) and tag[0] in one[before:after]:
        after += len(tag[0])
    # What ends the reasoning is not of the calls.
    thought = re.match(r"(?is).*<[^<>]*think[^<>]*>", one[before : one.index(_FIRST.name, before)])
    start = before + (thought.end() if thought else 0)
    has_both = both.startswith(one[:before]) and _SECOND.name in both[before:]
    end = len(both) - (len(one) - after)
    return Shown(one[start:after], both[start:end] if has_both else None, takes_any_id=bool(long))


def reads(form: ToolFormat, shown: Shown) -> bool:
    """Whether the parser finds the calls in what a template wrote, and nothing else."""
    return all(
        _calls_in(form, text) == [(call.name, _ARGUMENTS) for call in calls]
        for text, calls in (
            (shown.one, (_FIRST,)),
            *(((shown.both, (_FIRST, _SECOND)),) if shown.both else ()),
        )
    )


def _calls_in(form: ToolFormat, text: str) -> list[tuple[str, Any]] | None:
    parser = OutputParser(calls=form, tools=_PARSED_TOOLS)
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
    """The format of what a template wrote, if the parser can read it by that."""
    for core in _cores(shown.one, _FIRST):
        form = _format(shown, core)
        if form is not None and reads(form, shown):
            return form
    return None


@dataclass(frozen=True)
class _Core:
    """Where a call stands in a text, and its parts."""

    begin: int
    end: int
    parts: tuple[Part, ...]


def _cores(text: str, call: _Call) -> Iterator[_Core]:
    """The ways to read the call in ``text``."""
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
    text: str, at: int, end: int, call: _Call, between: tuple[Part, ...], rest: Part
) -> _Core:
    """A call that begins with its name, or with an id that stands before it."""
    id_at = text.rfind(call.call_id, 0, at)
    if id_at < 0:
        return _Core(at, end, (Name(), *between, rest))
    head = Literal(text[id_at + len(call.call_id) : at])
    return _Core(id_at, end, (Given(), head, Name(), *between, rest))


def _between(text: str, call: _Call) -> tuple[Part, ...]:
    """What is between name and arguments."""
    if call.call_id in text:
        before, _, after = text.partition(call.call_id)
        return (Literal(before), Given(), Literal(after))
    counted = re.search(r'(?<=")[01](?=")', text)
    if counted is not None:
        return (Literal(text[: counted.start()]), Number(), Literal(text[counted.end() :]))
    return (Literal(text),) if text.strip() else ()


def _fields(text: str, start: int) -> tuple[str, Fields, int] | None:
    """What is before the first argument, how arguments are tagged, and where the last one ends."""
    gaps, middles = [], []
    at = start
    for key, value in _ARGUMENTS.items():
        found = re.compile(
            f"(?s)(.*?){key}(.*?)({'|'.join(map(re.escape, _written(value)))})"
        ).match(text, at)
        if found is None:
            return None
        gaps.append(found[1])
        middles.append(found[2])
        at = found.end()
    rest = text[at:]
    # Whole tags only: what is before and behind them differs from argument to argument.
    opens = _common_end(gaps[0], gaps[1])
    opens = opens[max(opens.find("<"), 0) :]
    closes = re.sub(r"<[^>]*$", "", _common_start(gaps[1], rest))
    if not opens.strip() or not closes.strip():
        return None
    newline = closes.startswith("\n") and all(middle.endswith("\n") for middle in middles)
    head = gaps[0].removesuffix(opens)
    key, end, attribute = middles[0], "", None
    if len(set(middles)) > 1:
        key, end = _common_start(*middles), _common_end(*middles)
        texts = [middle[len(key) : len(middle) - len(end)] for middle in middles]
        attribute = dict(zip(_KINDS.values(), texts, strict=True))
    elif newline:
        key = key.removesuffix("\n")
    fields = Fields(
        (opens.lstrip(), key),
        (end, closes.strip()),
        newline=newline and attribute is None,
        attribute=attribute,
    )
    return head, fields, at + len(closes.rstrip())


def _written(value: object) -> Iterator[str]:
    yield value if isinstance(value, str) else json.dumps(value)
    yield json.dumps(value, separators=(",", ":"))
    yield repr(value)


def _format(shown: Shown, core: _Core) -> ToolFormat | None:
    before, end = shown.one[: core.begin], shown.one[core.end :]
    between: str | None = None
    if shown.both is not None:
        # The text of the second call is as long as that of the first: so are ids and names.
        length = core.end - core.begin
        again = len(shown.both) - len(end) - length
        between = shown.both[core.end : again]
    if any(
        call.call_id in text for call in (_FIRST, _SECOND) for text in (before, between or "", end)
    ):
        return None
    opens, begin = re.fullmatch(r"\s*(\S*)(.*)", before, re.DOTALL).groups()  # type: ignore[union-attr]
    is_bare = not opens.strip("[{")
    if is_bare:
        opens, begin = "", before.lstrip()
        if begin.strip() != "[" and not isinstance(core.parts[0], CallObject):
            return None  # It would begin as any text does.
    elif opens.endswith("["):  # Some answers have space before it.
        opens, begin = opens.removesuffix("["), f"[{begin}"
    last = between if between is not None else end
    tail = re.sub(r"(<[^>]*|[\[{,\s]+)$", "", _common_start(last, end))
    shape = Shape(
        begin=begin,
        call=(*core.parts, *((Literal(tail),) if tail.strip() else ())),
        between=between.removeprefix(tail) if between is not None else None,
        end=end.removeprefix(tail).rstrip(),
    )
    return ToolFormat(
        name="the template's own",
        opens=(opens,) if opens else (),
        is_bare=is_bare,
        shapes=(shape,),
        signs=(("tool",),),
        id_prefix="call_" if shown.takes_any_id else "",
        id_chars=24 if shown.takes_any_id else 9,
    )


def _json_at(text: str, start: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None, start


def _is_arguments(value: object) -> bool:
    """Whether these are the arguments: as they are, or as JSON in a string."""
    if isinstance(value, str):
        value, _ = _json_at(value, 0)
    return value == _ARGUMENTS


def _indices(text: str, char: str, start: int, end: int) -> Iterator[int]:
    return (at for at in range(start, end) if text[at] == char)


def _common_start(*texts: str) -> str:
    pairs = enumerate(zip(*texts, strict=False))
    shortest = min(map(len, texts))
    return texts[0][: next((at for at, chars in pairs if len(set(chars)) > 1), shortest)]


def _common_end(*texts: str) -> str:
    return _common_start(*(text[::-1] for text in texts))[::-1]


def _tags(text: str) -> list[str]:
    return re.findall(r"<[^<>\s]*>", text)
