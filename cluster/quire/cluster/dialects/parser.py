"""An answer's text as reasoning, content and calls, from pieces of any size.

The parser waits only where the next text decides what the last was. Text that began like a call and
is none comes back as content; a call that does not end comes out as far as it went.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

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
from quire.cluster.dialects.reader import Reader, Reading
from quire.cluster.dialects.strict_json import StrictJson, written
from quire.cluster.dialects.tools import MAX_NAME_CHARS, NAME_CHARS, Tool
from quire.cluster.dialects.values import kinds_of, python_as_json, tagged_as_json
from quire.worker.text.reasoning import Frame, ReasoningFormat

_NAME = re.compile(f"[{NAME_CHARS}]*")
_KEYWORD = re.compile(r"\w*")
_PLAIN_NAME = re.compile(r'[^\s:,{}\[\]"<]*')
_SCALAR = re.compile(r"[^,{}\[\]]*")
_ID = re.compile(r"[\w.:-]*")
_NUMBER = re.compile(r"[0-9]*")
_HEADER = re.compile(r"[^<]*")
_MAX_NUMBER_CHARS = 9
_MAX_HEADER_CHARS = 256
_MAX_DEPTH = 32
_MAX_REREAD_CHARS = 4096
"""Text that was not a call after all is searched for another only up to this length."""


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegun:
    index: int
    name: str
    given_id: str = ""
    """Where the model gives ids itself."""


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    index: int
    is_whole: bool = True
    """Its arguments are a JSON object; else it was cut, or is none."""


Event = Content | Reasoning | CallBegun | CallArguments | CallEnded


class OutputParser:
    """Parses one answer. Without ``tools`` there are no calls in it, and without ``reasoning`` no
    reasoning. ``is_reasoning``: the prompt ended within it, and, where the answer ``goes_on``, has
    a text of it. ``has_form``: a grammar keeps the calls to their schemas."""

    def __init__(
        self,
        *,
        calls: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        reasoning: ReasoningFormat | None = None,
        is_reasoning: bool = False,
        goes_on: bool = False,
        has_form: bool = False,
    ) -> None:
        self._format = calls if tools else None
        format_of_frame = calls or reasoning
        self._frame = format_of_frame.frame if format_of_frame else None
        self._schemas: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._goes_on = goes_on
        self._has_form = has_form
        self._reader = Reader()
        self._events: list[Event] = []
        self._spaces: list[str] = []  # That may belong to the text or to a marker behind them.
        self._num_calls = 0
        self._name = ""
        self._number = ""
        self._given_id = ""
        self._arguments: list[str] = []
        self._json = StrictJson()
        self._unended: tuple[str, ...] = ()  # What may still end the reasoning.
        self._is_begun = False  # The call that is being read.
        self._is_bare = False  # It stands without a marker.
        self._machine = self._answer()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """What is certain with ``text``."""
        self._reader.feed(text)
        self._machine.send(None)
        return self._told()

    def finish(self) -> list[Event]:
        """The rest, at the end of the answer."""
        self._reader.end()
        for _ in self._machine:
            raise AssertionError("nothing waits for more")
        return self._told()

    def _told(self) -> list[Event]:
        """What was told since; text that follows on from text of its kind is one event."""
        events, self._events = self._events, []
        if len(events) < 2:
            return events
        joined: list[Event] = []
        for _, group in groupby(events, key=type):
            run = list(group)
            first = run[0]
            if isinstance(first, Content | Reasoning | CallArguments):
                text = "".join(getattr(each, "text", "") for each in run)
                joined.append(replace(first, text=text))
            else:
                joined += run
        return joined

    def _answer(self) -> Generator[None, None, None]:
        reader, calls = self._reader, self._format
        if self._frame is not None:
            yield from self._read_messages(self._frame)
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if calls is None:
            yield from reader.until((), lambda text: self._tell(Content(text)))
            return
        if calls.is_bare:
            yield from self._read_calls(calls, marker="")
        markers = (*self._opens(calls), *calls.closes, *self._unended)
        while marker := (yield from reader.until(markers, self._say)):
            if marker in self._unended:
                continue
            if marker in calls.closes:
                if not self._num_calls:
                    self._say(marker)
            else:
                yield from self._read_calls(calls, marker=marker)
        if not self._num_calls:
            self._flush_spaces()

    def _opens(self, calls: ToolFormat) -> tuple[str, ...]:
        """What may begin a call: only what the grammar writes, where there is one."""
        if self._has_form:
            return calls.opens[:1]
        return (*calls.opens, calls.implied) if calls.implied else calls.opens

    def _read_messages(self, frame: Frame) -> Reading[None]:
        reader = self._reader
        channel, name = frame.reasoning, ""
        if not self._is_reasoning:
            channel, name = yield from self._read_header(frame)
        while True:
            ends = (*frame.ends, frame.start)
            self._name = name
            if name in self._schemas and self._format is not None:
                self._begin()
                yield from reader.spaces()
                if (yield from reader.peek()) in ("", "<"):
                    self._argue("{}")
                end = yield from reader.until(ends, self._argue_json)
                self._end_call(is_whole=True)
            else:
                reasons = self._reasoning is not None and channel == frame.reasoning
                kind = Reasoning if reasons else Content
                end = yield from reader.until(ends, partial(self._tell_of, kind))
            if end is None:
                return
            if end == frame.start:
                reader.put_back(end)
            channel, name = yield from self._read_header(frame)

    def _read_header(self, frame: Frame) -> Reading[tuple[str, str]]:
        """Channel and function of the header that comes next; both empty where none does."""
        reader = self._reader
        read: dict[str, str] = {}
        reader.record()
        if (yield from reader.literal(f" {frame.function}", take=False)):
            read[""] = yield from reader.run(_HEADER, max_chars=_MAX_HEADER_CHARS)
        while not (yield from reader.literal(frame.message)):
            for mark in (frame.start, frame.channel, frame.kind):
                if (yield from reader.literal(mark)):
                    read[mark] = yield from reader.run(_HEADER, max_chars=_MAX_HEADER_CHARS)
                    break
            else:
                mark = ""
            if not mark or sum(map(len, read.values())) > _MAX_HEADER_CHARS:
                text = reader.recorded()  # It is no header.
                if text:
                    self._tell(Content(text))
                return "", ""
        reader.forget()
        channel = read.get(frame.channel, "").partition(" ")[0]
        called = re.search(f"{re.escape(frame.function)}([{NAME_CHARS}]+)", " ".join(read.values()))
        return channel, called[1][:MAX_NAME_CHARS] if called is not None else ""

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        reader = self._reader
        reader.record()
        yield from reader.spaces()
        is_opened = yield from reader.literal(reasoning.opens)
        if not is_opened and not self._is_reasoning:
            reader.put_back(reader.recorded())
            return
        if self._goes_on and not is_opened:
            reader.put_back(reader.recorded())
        else:
            reader.forget()
            yield from reader.spaces()
        calls = self._format
        opens = self._opens(calls) if calls is not None else ()
        while marker := (yield from reader.until((reasoning.closes, *opens), self._reason)):
            if marker == reasoning.closes:
                break
            assert calls is not None
            yield from self._read_calls(calls, marker=marker, of=Reasoning)
            if self._num_calls:  # The model forgot to end the reasoning, or does so later.
                self._unended = (reasoning.closes,)
                return
        self._spaces.clear()
        yield from reader.spaces()

    def _read_calls(
        self,
        calls: ToolFormat,
        *,
        marker: str,
        of: Callable[[str], Content | Reasoning] = Content,
    ) -> Reading[None]:
        """Reads what follows ``marker``; if it is no call, it becomes ``of``, or is put back."""
        reader, num_before = self._reader, self._num_calls
        self._is_bare = not marker
        reader.record()
        if marker == calls.implied:
            reader.put_back(marker)
        yield from reader.spaces()
        for shape in calls.shapes:
            begin = shape.begin.strip()
            if not begin or (yield from reader.literal(begin)):
                yield from self._read_shape(shape)
                break
        unread = reader.recorded()
        if self._num_calls == num_before:
            if marker == calls.implied and not unread:
                yield from reader.literal(marker)  # No part of it was read.
            elif marker == calls.implied:
                unread = unread.removeprefix(marker)
            self._say(marker, of=of)
        if len(unread) > _MAX_REREAD_CHARS:
            self._say(unread, of=of)
        else:
            reader.put_back(unread)

    def _read_shape(self, shape: Shape) -> Reading[None]:
        reader = self._reader
        while (yield from self._read_call(shape)):
            reader.record()
            yield from reader.spaces()
            end = shape.end.strip()
            if end and (yield from reader.literal(end)):
                reader.forget()
                return
            if shape.between is None:
                return
            separator = shape.between.strip()
            is_apart = not separator or (yield from reader.literal(separator))
            if not is_apart and not isinstance(shape.call[0], CallObject):
                return  # Else text could look like another call.
            yield from reader.spaces()

    def _read_call(self, shape: Shape) -> Reading[bool]:
        """Whether a call was read to its end. What is read of it is recorded until it begins.
        Behind arguments that are none, what closes the call ends it."""
        self._name, self._number, self._given_id, self._is_begun = "", "", "", False
        is_whole = is_closed = True
        end = shape.end.strip()
        for number, part in enumerate(shape.call):
            ends = [each.text for each in shape.call[number + 1 :] if isinstance(each, Literal)][:1]
            marks = (each.strip() for each in (*ends, end, shape.between or ""))
            if (yield from self._read_part(part, tuple(filter(None, marks)))):
                is_closed = is_whole or (isinstance(part, Literal) and bool(part.text.strip()))
                continue
            if not self._is_begun or not is_whole:
                is_closed = False
                break
            is_whole = is_closed = False
        if self._is_begun:
            if not is_closed and end:
                is_closed = yield from self._reader.literal(end, take=False)
            self._end_call(is_whole=is_closed)
        return is_closed

    def _read_part(self, part: Part, ends: tuple[str, ...]) -> Reading[bool]:
        """``ends``: the marks that may follow."""
        yield from self._reader.spaces()
        match part:
            case Literal(text, is_optional):
                return (yield from self._reader.literal(text.strip())) or is_optional
            case Spaces():
                return True
            case Name():
                self._name = yield from self._reader.run(_NAME, max_chars=MAX_NAME_CHARS)
                return 0 < len(self._name) <= MAX_NAME_CHARS
            case Number(is_optional):
                self._number = yield from self._reader.run(_NUMBER, max_chars=_MAX_NUMBER_CHARS)
                is_there = is_optional or bool(self._number)
                return is_there and len(self._number) <= _MAX_NUMBER_CHARS
            case Given(mark):
                if mark and not (yield from self._reader.literal(mark)):
                    return True
                self._given_id = yield from self._reader.run(_ID, max_chars=MAX_NAME_CHARS)
                return 0 < len(self._given_id) <= MAX_NAME_CHARS
            case Arguments():
                return (yield from self._read_arguments(ends))
            case CallObject():
                return (yield from self._read_object(part))
            case Keywords():
                return (yield from self._read_keywords())
            case Braces(quote):
                if (yield from self._reader.peek()) != "{" or not self._begin():
                    return False
                return (yield from self._read_braced(quote, _MAX_DEPTH, kinds=None))
            case Fields():
                return (yield from self._read_fields(part, ends))

    def _begin(self) -> bool:
        """Tells of the call, unless it is of no tool of the request."""
        if self._name not in self._schemas:
            return False
        self._reader.forget()
        self._spaces.clear()
        self._is_begun = True
        self._arguments.clear()
        self._json = StrictJson()
        self._num_calls += 1
        given_id = f"functions.{self._name}:{self._number}" if self._number else ""
        self._tell(CallBegun(self._num_calls - 1, self._name, self._given_id or given_id))
        return True

    def _read_arguments(self, ends: tuple[str, ...] = ()) -> Reading[bool]:
        for end in ends:
            if (yield from self._reader.literal(end, take=False)):
                return self._begin() and self._argue("{}")
        if (yield from self._reader.literal("null")):
            return self._begin() and self._argue("{}")
        first = yield from self._reader.peek()
        if first not in ("{", "[", '"') or not self._begin():
            return False
        if first == '"':  # JSON in a string of JSON.
            text = yield from self._reader.json_string()
            self._argue_json((text or "").strip() or "{}")
            return text is not None
        return (yield from self._reader.json_value(self._argue_json))

    def _read_object(self, part: CallObject) -> Reading[bool]:
        reader = self._reader
        keys = {"arguments", "parameters", part.arguments}
        early: list[str] | None = None  # Arguments before the name.
        if not (yield from reader.literal("{")):
            return False
        num_keys = 0
        while True:
            yield from reader.spaces()
            if (yield from reader.literal("}")):
                break
            if num_keys:
                if not (yield from reader.literal(",")):
                    return False
                yield from reader.spaces()
            num_keys += 1
            key = yield from reader.json_string()
            yield from reader.spaces()
            if key is None or not (yield from reader.literal(":")):
                return False
            yield from reader.spaces()
            if key == part.name and not self._name:
                self._name = (yield from reader.json_string()) or ""
                if not self._name or len(self._name) > MAX_NAME_CHARS:
                    return False
                if early is not None:
                    if not self._begin():
                        return False
                    self._argue_json("".join(early))
            elif key in keys and self._name and not self._is_begun:
                if not (yield from self._read_arguments()):
                    return False
            else:
                is_early = key in keys and not self._name
                if self._is_bare and not is_early and key not in ("type", "id"):
                    return False
                value: list[str] = []
                if not (yield from reader.json_value(value.append)):
                    return False
                early = value if is_early else early
        if not self._is_begun:
            if not self._name or self._is_bare or not self._begin():
                return False
            self._argue("{}")
        return True

    def _read_fields(self, part: Fields, ends: tuple[str, ...]) -> Reading[bool]:
        """Arguments between tags, up to one of ``ends``."""
        reader = self._reader
        num_fields = 0
        while True:
            yield from reader.spaces()
            if not (yield from reader.literal(part.key[0])):
                break
            key: list[str] = []
            if (yield from reader.until((part.key[1],), key.append)) is None:
                return False
            attribute: list[str] = []
            if part.attribute is not None:
                if (yield from reader.until((part.value[0],), attribute.append)) is None:
                    return False
            elif part.value[0]:
                yield from reader.spaces()
                if not (yield from reader.literal(part.value[0])):
                    return False
            if not self._is_begun and not self._begin():
                return False
            name = "".join(key).strip()
            self._argue(f'{", " if num_fields else "{"}"{written(name)}": ')
            if not (yield from self._read_field(part, name, "".join(attribute), ends)):
                return False
            num_fields += 1
        for end in ends:
            if (yield from reader.literal(end, take=False)):
                break
        else:
            return False
        if not self._is_begun and not self._begin():
            return False
        self._argue("}" if num_fields else "{}")
        return True

    def _read_field(
        self, part: Fields, name: str, attribute: str, follow: tuple[str, ...]
    ) -> Reading[bool]:
        reader = self._reader
        ends: tuple[str, ...] = (part.value[1],)
        if part.newline:
            yield from reader.literal("\n")
            ends = (f"\n{part.value[1]}", part.value[1])
            if not self._has_form:  # Some answers lack the mark that ends a value.
                ends += tuple(f"\n{mark}" for mark in (part.key[0], *follow))
        tool = self._schemas.get(self._name)
        kinds = kinds_of(name, tool.parameters if tool is not None else {})
        may_be_text = kinds is None or "string" in kinds  # Models say so of other values, too.
        if may_be_text and part.attribute is not None and attribute == part.attribute["string"]:
            kinds = frozenset({"string"})
        if kinds == frozenset({"string"}):
            self._argue('"')
            end = yield from reader.until(ends, lambda text: self._argue(written(text)))
            self._put_back(part, end)
            return end is not None and self._argue('"')
        value: list[str] = []
        # A text within JSON may have the mark that ends the value. Where the value may be no JSON,
        # the first mark ends it.
        is_json = self._has_form and kinds is not None and "string" not in kinds
        if is_json and (yield from reader.peek()) in ("{", "["):
            yield from reader.json_value(value.append)
        end = yield from reader.until(ends, value.append)
        self._put_back(part, end)
        text = "".join(value)
        self._argue(tagged_as_json(text, kinds) if end is not None else text)
        return end is not None

    def _put_back(self, part: Fields, end: str | None) -> None:
        """What ended a value, unless it is the value's own mark."""
        if end is not None and part.value[1] not in end:
            self._reader.put_back(end)

    def _read_keywords(self) -> Reading[bool]:
        reader = self._reader
        num_keywords = 0
        while True:
            yield from reader.spaces()
            if num_keywords and not (yield from reader.literal(")", take=False)):
                if not (yield from reader.literal(",")):
                    return False
                yield from reader.spaces()
            if (yield from reader.literal(")")):
                if not self._is_begun and not self._begin():
                    return False
                self._argue("}" if num_keywords else "{}")
                return True
            keyword = yield from reader.run(_KEYWORD)
            yield from reader.spaces()
            if not keyword or not (yield from reader.literal("=")):
                return False
            if not self._is_begun and not self._begin():
                return False
            self._argue(f'{", " if num_keywords else "{"}"{keyword}": ')
            value: list[str] = []
            is_whole = yield from reader.python_value(value.append)
            text = "".join(value)
            self._argue(python_as_json(text) if is_whole else text)
            if not is_whole:
                return False
            num_keywords += 1

    def _read_braced(
        self, quote: str, depth_left: int, *, kinds: frozenset[str] | None
    ) -> Reading[bool]:
        """A value of `Braces`. ``kinds`` are those that it may have, where they are known."""
        reader = self._reader
        is_text = kinds == frozenset({"string"})
        if (yield from reader.literal(quote)):
            if kinds is not None and "string" not in kinds:
                return (yield from self._read_marked(quote, kinds))
            self._argue('"')
            if (yield from reader.until((quote,), lambda text: self._argue(written(text)))) is None:
                return False
            return self._argue('"')
        first = yield from reader.peek()
        if first == '"':
            value: list[str] = []
            is_whole = yield from reader.json_value(value.append)
            return self._argue(python_as_json("".join(value)) if is_whole else "") and is_whole
        if first not in ("{", "["):
            text = yield from reader.run(_SCALAR)
            is_whole = bool((yield from reader.peek()))
            text = text.strip()
            self._argue(tagged_as_json(text, kinds if is_text else None) if is_whole else text)
            return is_whole
        close = "}" if first == "{" else "]"
        yield from reader.literal(first)
        self._argue(first)
        num_values = 0
        name: str | None = None
        while True:
            yield from reader.spaces()
            if num_values and (yield from reader.literal(",")):
                yield from reader.spaces()
            elif num_values and not (yield from reader.literal(close, take=False)):
                return False
            if (yield from reader.literal(close)):
                self._argue(close)
                return True
            comma = ", " if num_values else ""
            if first == "{":
                name = yield from self._read_braced_name(quote)
                yield from reader.spaces()
                if name is None or not (yield from reader.literal(":")):
                    return False
                self._argue(f'{comma}"{written(name)}": ')
                yield from reader.spaces()
            else:
                self._argue(comma)
            tool = self._schemas.get(self._name) if name and depth_left == _MAX_DEPTH else None
            kinds = kinds_of(name, tool.parameters) if name and tool is not None else None
            if not depth_left:
                return False
            if not (yield from self._read_braced(quote, depth_left - 1, kinds=kinds)):
                return False
            num_values += 1

    def _read_marked(self, quote: str, kinds: frozenset[str]) -> Reading[bool]:
        """What is no text, between two ``quote`` all the same."""
        value: list[str] = []
        if (yield from self._reader.until((quote,), value.append)) is None:
            return False
        return self._argue(tagged_as_json("".join(value), kinds))

    def _read_braced_name(self, quote: str) -> Reading[str | None]:
        reader = self._reader
        if (yield from reader.literal(quote)):
            name: list[str] = []
            end = yield from reader.until((quote,), name.append)
            return None if end is None else "".join(name)
        if (yield from reader.peek()) == '"':
            return (yield from reader.json_string())
        return (yield from reader.run(_PLAIN_NAME))

    def _say(self, text: str, *, of: Callable[[str], Content | Reasoning] = Content) -> None:
        """Tells of text, less whitespace at its end, which a marker may follow."""
        stripped = text.rstrip()
        if stripped:
            self._flush_spaces(of=of)
            self._tell(of(stripped))
        if len(stripped) < len(text):
            self._spaces.append(text[len(stripped) :])

    def _reason(self, text: str) -> None:
        self._say(text, of=Reasoning)

    def _flush_spaces(self, *, of: Callable[[str], Content | Reasoning] = Content) -> None:
        spaces = "".join(self._spaces)
        self._spaces.clear()
        if spaces:
            self._tell(of(spaces))

    def _argue_json(self, text: str) -> None:
        """Arguments as the model writes them, in JSON of its own."""
        self._argue(self._json.strict(text))

    def _end_call(self, *, is_whole: bool) -> None:
        try:
            is_whole = is_whole and isinstance(json.loads("".join(self._arguments)), dict)
        except (ValueError, RecursionError):
            is_whole = False
        self._tell(CallEnded(self._num_calls - 1, is_whole))

    def _argue(self, text: str) -> bool:
        if text:
            self._arguments.append(text)
            self._tell(CallArguments(self._num_calls - 1, text))
        return True

    def _tell_of(self, kind: type[Content | Reasoning], text: str) -> None:
        self._tell(kind(text))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
