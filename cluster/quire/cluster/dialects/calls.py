"""Parses tool calls, one after another, part by part as the table of formats describes them.

A call is reported as soon as it is certain that it calls a tool of the request. Its arguments are
then reported as JSON while they arrive.
"""

import json
import re
from collections.abc import Callable, Mapping

from quire.cluster.dialects.events import CallArguments, CallBegun, CallEnded
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
)
from quire.cluster.dialects.reader import Reader, Reading
from quire.cluster.dialects.strict_json import StrictJson, written
from quire.cluster.dialects.tools import MAX_NAME_CHARS, NAME_CHARS, Tool
from quire.cluster.dialects.values import cut_as_json, kinds_of, python_as_json, tagged_as_json

_NAME = re.compile(f"[{NAME_CHARS}]*")
_KEYWORD = re.compile(r"\w*")
_PLAIN_NAME = re.compile(r'[^\s:,{}\[\]"<]*')
_SCALAR = re.compile(r"[^,{}\[\]]*")
_ID = re.compile(r"[\w.:-]*")
_NUMBER = re.compile(r"[0-9]*")
_MAX_NUMBER_CHARS = 9
_MAX_DEPTH = 32

Tell = Callable[[CallBegun | CallArguments | CallEnded], None]


class CallReader:
    """Reads calls of the tools ``schemas`` from ``reader``. ``has_form``: whether a grammar makes
    the calls fit their schemas."""

    def __init__(
        self, reader: Reader, schemas: Mapping[str, Tool], tell: Tell, *, has_form: bool
    ) -> None:
        self.num_calls = 0
        self._reader = reader
        self._schemas = schemas
        self._tell = tell
        self._has_form = has_form
        self._name = ""
        self._number = ""
        self._given_id = ""
        self._arguments: list[str] = []
        self._json: StrictJson  # Converts the current call's arguments.
        self._is_begun = False
        self._is_bare = False
        self._fits = True  # Whether its values have the schema's types.

    def read(self, shape: Shape, *, is_bare: bool) -> Reading[bool]:
        """Reads one call; returns whether it was read to its end. The text read is recorded until
        the call begins. If the arguments are invalid, the call still ends at its closing mark.
        ``is_bare``: the call has no marker before it."""
        self._name, self._number, self._given_id, self._is_begun = "", "", "", False
        self._is_bare = is_bare
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
            self.end(is_whole=is_closed)
        return is_closed

    def begin_of(self, name: str) -> bool:
        """Begins a call of the tool ``name``; returns false if the request has no such tool."""
        self._name, self._number, self._given_id, self._is_begun = name, "", "", False
        return self._begin()

    def argue_json(self, text: str) -> None:
        """Adds arguments in the model's own, possibly loose, JSON."""
        self.argue(self._json.strict(text))

    def end(self, *, is_whole: bool) -> None:
        try:
            is_whole = (
                is_whole and self._fits and isinstance(json.loads("".join(self._arguments)), dict)
            )
        except (ValueError, RecursionError):
            is_whole = False
        self._tell(CallEnded(self.num_calls - 1, is_whole))

    def argue(self, text: str) -> bool:
        if text:
            self._arguments.append(text)
            self._tell(CallArguments(self.num_calls - 1, text))
        return True

    def _read_part(self, part: Part, ends: tuple[str, ...]) -> Reading[bool]:
        """Reads one part of a call. ``ends``: the marks that may follow it."""
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
        """Reports the call, once; returns false if it calls no tool of the request."""
        if self._is_begun:
            return True
        if self._name not in self._schemas:
            return False
        self._reader.forget()
        self._is_begun = True
        self._fits = True
        self._arguments.clear()
        self._json = StrictJson()
        self.num_calls += 1
        given_id = f"functions.{self._name}:{self._number}" if self._number else ""
        self._tell(CallBegun(self.num_calls - 1, self._name, self._given_id or given_id))
        return True

    def _read_arguments(self, ends: tuple[str, ...] = ()) -> Reading[bool]:
        if (yield from self._is_at(ends)) or (yield from self._reader.literal("null")):
            return self._begin() and self.argue("{}")
        first = yield from self._reader.peek()
        if first not in ("{", "[", '"') or not self._begin():
            return False
        if first == '"':  # JSON text within a JSON string.
            text = yield from self._reader.json_string()
            self.argue_json((text or "").strip() or "{}")
            return text is not None
        return (yield from self._reader.json_value(self.argue_json))

    def _is_at(self, ends: tuple[str, ...]) -> Reading[bool]:
        """Whether one of ``ends`` comes next."""
        for end in ends:
            if (yield from self._reader.literal(end, take=False)):
                return True
        return False

    def _read_object(self, part: CallObject) -> Reading[bool]:
        reader = self._reader
        keys = {"arguments", "parameters", part.arguments}
        early: list[str] | None = None  # Arguments that came before the name.
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
                    self.argue_json("".join(early))
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
            self.argue("{}")
        return True

    def _read_fields(self, part: Fields, ends: tuple[str, ...]) -> Reading[bool]:
        """Reads arguments between tags, up to one of ``ends``."""
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
            if not self._begin():
                return False
            name = "".join(key).strip()
            self.argue(f'{", " if num_fields else "{"}"{written(name)}": ')
            if not (yield from self._read_field(part, name, "".join(attribute), ends)):
                return False
            num_fields += 1
        is_closed = yield from self._is_at(ends)
        return is_closed and self._begin() and self.argue("}" if num_fields else "{}")

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
        may_be_text = kinds is None or "string" in kinds  # Models mark other types so, too.
        if may_be_text and part.attribute is not None and attribute == part.attribute["string"]:
            kinds = frozenset({"string"})
        if kinds == frozenset({"string"}):
            self.argue('"')
            end = yield from reader.until(ends, lambda text: self.argue(written(text)))
            self._put_back(part, end)
            return end is not None and self.argue('"')
        value: list[str] = []
        # A string within JSON may contain the mark that ends the value. If the value may be other
        # than JSON, the first mark ends it.
        is_json = self._has_form and kinds is not None and "string" not in kinds
        if is_json and (yield from reader.peek()) in ("{", "["):
            yield from reader.json_value(value.append)
        end = yield from reader.until(ends, value.append)
        self._put_back(part, end)
        text = "".join(value)
        if end is None:
            self.argue(cut_as_json(text))
            return False
        self._argue_tagged(text, kinds)
        return True

    def _argue_tagged(self, text: str, kinds: frozenset[str] | None) -> bool:
        """Adds a value between tags. If it has none of the types ``kinds``, it is written as a
        string, and the call does not count as whole."""
        shown = tagged_as_json(text, kinds)
        if kinds is not None and "string" not in kinds and shown.startswith('"'):
            self._fits = False
        return self.argue(shown)

    def _put_back(self, part: Fields, end: str | None) -> None:
        """Puts back the text that ended a value, unless it is the value's own end mark."""
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
                return self._begin() and self.argue("}" if num_keywords else "{}")
            keyword = yield from reader.run(_KEYWORD)
            yield from reader.spaces()
            if not keyword or not (yield from reader.literal("=")):
                return False
            if not self._begin():
                return False
            self.argue(f'{", " if num_keywords else "{"}"{keyword}": ')
            value: list[str] = []
            is_whole = yield from reader.python_value(value.append)
            text = "".join(value)
            self.argue(python_as_json(text) if is_whole else cut_as_json(text))
            if not is_whole:
                return False
            num_keywords += 1

    def _read_braced(
        self, quote: str, depth_left: int, *, kinds: frozenset[str] | None
    ) -> Reading[bool]:
        """Reads a value in the form of `Braces`. ``kinds``: the types that it may have, if
        known."""
        reader = self._reader
        is_text = kinds == frozenset({"string"})
        if (yield from reader.literal(quote)):
            if kinds is not None and "string" not in kinds:
                marked: list[str] = []  # A value between two ``quote`` that is not a string.
                end = yield from reader.until((quote,), marked.append)
                return end is not None and self._argue_tagged("".join(marked), kinds)
            self.argue('"')
            if (yield from reader.until((quote,), lambda text: self.argue(written(text)))) is None:
                return False
            return self.argue('"')
        first = yield from reader.peek()
        if first == '"':
            value: list[str] = []
            is_whole = yield from reader.json_value(value.append)
            return self.argue(python_as_json("".join(value)) if is_whole else "") and is_whole
        if first not in ("{", "["):
            text = yield from reader.run(_SCALAR)
            is_whole = bool((yield from reader.peek()))
            text = text.strip()
            shown = tagged_as_json(text, kinds if is_text else None)
            self.argue(shown if is_whole else cut_as_json(text))
            return is_whole
        close = "}" if first == "{" else "]"
        yield from reader.literal(first)
        self.argue(first)
        num_values = 0
        name: str | None = None
        while True:
            yield from reader.spaces()
            if num_values and (yield from reader.literal(",")):
                yield from reader.spaces()
            elif num_values and not (yield from reader.literal(close, take=False)):
                return False
            if (yield from reader.literal(close)):
                self.argue(close)
                return True
            comma = ", " if num_values else ""
            if first == "{":
                name = yield from self._read_braced_name(quote)
                yield from reader.spaces()
                if name is None or not (yield from reader.literal(":")):
                    return False
                self.argue(f'{comma}"{written(name)}": ')
                yield from reader.spaces()
            else:
                self.argue(comma)
            tool = self._schemas.get(self._name) if name and depth_left == _MAX_DEPTH else None
            kinds = kinds_of(name, tool.parameters) if name and tool is not None else None
            if not depth_left:
                return False
            if not (yield from self._read_braced(quote, depth_left - 1, kinds=kinds)):
                return False
            num_values += 1

    def _read_braced_name(self, quote: str) -> Reading[str | None]:
        reader = self._reader
        if (yield from reader.literal(quote)):
            name: list[str] = []
            end = yield from reader.until((quote,), name.append)
            return None if end is None else "".join(name)
        if (yield from reader.peek()) == '"':
            return (yield from reader.json_string())
        return (yield from reader.run(_PLAIN_NAME))
