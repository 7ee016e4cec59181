"""Parses an answer's text, in pieces of any size, into reasoning, content and tool calls.

The parser waits only when further text decides how to interpret the last. Text that began like a
call and is not one becomes content. A call that does not end is reported as far as it went.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from quire.cluster.dialects.calls import CallReader
from quire.cluster.dialects.events import CallArguments, CallBegun, Content, Event, Reasoning
from quire.cluster.dialects.formats import CallObject, Shape, ToolFormat
from quire.cluster.dialects.reader import Reader, Reading
from quire.cluster.dialects.tools import MAX_NAME_CHARS, NAME_CHARS, Tool
from quire.worker.text.reasoning import Frame, ReasoningFormat

_HEADER = re.compile(r"[^<]*")
_MAX_HEADER_CHARS = 256
_MAX_REREAD_CHARS = 4096
"""Text that turned out not to be a call is searched for another call only up to this length."""


class OutputParser:
    """Parses one answer. Without ``tools`` it reports no calls, and without ``reasoning`` no
    reasoning. ``is_reasoning``: the prompt ended within reasoning; ``goes_on``: the prompt already
    has text of it. ``has_form``: whether a grammar makes the calls fit their schemas."""

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
        self._format = calls if tools or (calls and calls.around) else None
        format_of_frame = calls or reasoning
        self._frame = format_of_frame.frame if format_of_frame else None
        self._schemas: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._goes_on = goes_on
        self._has_form = has_form
        self._reader = Reader()
        self._events: list[Event] = []
        self._spaces: list[str] = []  # They belong to the text or to a marker after them.
        self._calls = CallReader(self._reader, self._schemas, self._tell, has_form=has_form)
        self._unended: tuple[str, ...] = ()  # Marks that may still end the reasoning.
        self._machine = self._answer()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """The events that are certain once ``text`` has arrived."""
        self._reader.feed(text)
        self._machine.send(None)
        return self._told()

    def finish(self) -> list[Event]:
        """The remaining events, at the end of the answer."""
        self._reader.end()
        for _ in self._machine:
            raise AssertionError("nothing waits for more")
        return self._told()

    def _told(self) -> list[Event]:
        """The events since the last call. Adjacent texts of the same kind are joined."""
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
        closes = calls.around.closes if calls.around is not None else ()
        if not (yield from self._read_begin_of_text(calls)) and calls.is_bare:
            yield from self._read_calls(calls, marker="")
        opens = self._opens(calls)
        markers = tuple(dict.fromkeys((*opens, *calls.closes, *self._unended, *closes)))
        while marker := (yield from reader.until(markers, self._say)):
            if marker in self._unended or (marker in closes and marker not in opens):
                continue
            if marker in opens and (yield from self._read_begin_of_text(calls)):
                continue
            if marker in calls.closes:
                if not self._calls.num_calls:
                    self._say(marker)
            else:
                yield from self._read_calls(calls, marker=marker)
        if not self._calls.num_calls:
            self._flush_spaces()

    def _opens(self, calls: ToolFormat) -> tuple[str, ...]:
        """Texts that may begin a call. With a grammar, only the one that it writes."""
        if self._has_form:
            return calls.opens[:1]
        return (*calls.opens, calls.implied) if calls.implied else calls.opens

    def _read_begin_of_text(self, calls: ToolFormat) -> Reading[bool]:
        """Reads the mark before text that is not a call; returns whether it was there."""
        reader = self._reader
        if calls.around is None or not calls.around.opens:
            return False
        reader.record()
        yield from reader.spaces()
        if (yield from reader.literal(calls.around.opens.lstrip())):
            reader.forget()
            return True
        reader.put_back(reader.recorded())
        return False

    def _read_messages(self, frame: Frame) -> Reading[None]:
        reader = self._reader
        channel, name = frame.reasoning, ""
        if not self._is_reasoning:
            channel, name = yield from self._read_header(frame)
        while True:
            ends = (*frame.ends, frame.start)
            if self._format is not None and self._calls.begin_of(name):
                yield from reader.spaces()
                if (yield from reader.peek()) in ("", "<"):
                    self._calls.argue("{}")
                end = yield from reader.until(ends, self._calls.argue_json)
                self._calls.end(is_whole=True)
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
        """Channel and function of the next header; both are empty if none follows."""
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
                text = reader.recorded()  # Not a header.
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
            if self._calls.num_calls:  # The model forgot to end it, or will do so later.
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
        """Reads the text after ``marker``. If it is not a call, it becomes an event of type ``of``,
        or is put back."""
        reader, num_before = self._reader, self._calls.num_calls
        reader.record()
        if marker == calls.implied:
            reader.put_back(marker)
        yield from reader.spaces()
        # A shape without a begin mark of its own is tried last.
        for shape in sorted(calls.shapes, key=lambda each: not each.begin.strip()):
            begin = shape.begin.strip()
            if not begin or (yield from reader.literal(begin)):
                yield from self._read_shape(shape, is_bare=not marker)
                break
        unread = reader.recorded()
        if self._calls.num_calls == num_before:
            if marker == calls.implied and not unread:
                yield from reader.literal(marker)  # Reads the marker again: none of it was read.
            elif marker == calls.implied:
                unread = unread.removeprefix(marker)
            if calls.around is None or marker not in calls.around.closes:
                self._say(marker, of=of)
        if len(unread) > _MAX_REREAD_CHARS:
            self._say(unread, of=of)
        else:
            reader.put_back(unread)

    def _read_shape(self, shape: Shape, *, is_bare: bool) -> Reading[None]:
        reader = self._reader
        while (yield from self._calls.read(shape, is_bare=is_bare)):
            reader.record()
            yield from reader.spaces()
            end = shape.end.strip()
            if end and (yield from reader.literal(end)):
                reader.forget()
                return
            is_object = isinstance(shape.call[0], CallObject)
            if shape.between is None and not is_object:
                return
            separator = (shape.between or "").strip()
            is_apart = not separator or (yield from reader.literal(separator))
            if not is_apart and not is_object:
                return  # Otherwise text could look like another call.
            yield from reader.spaces()

    def _say(self, text: str, *, of: Callable[[str], Content | Reasoning] = Content) -> None:
        """Reports text. Whitespace at its end is held back: a marker may follow."""
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

    def _tell_of(self, kind: type[Content | Reasoning], text: str) -> None:
        self._tell(kind(text))

    def _tell(self, event: Event) -> None:
        if isinstance(event, CallBegun):
            self._spaces.clear()  # Whitespace before a call belongs to it.
        self._events.append(event)
