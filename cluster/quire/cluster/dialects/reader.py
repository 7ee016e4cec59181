"""Reads text that arrives in pieces as if it were whole.

Every function that may have to wait for text is a generator: it yields where it waits, and returns
what it has read. It decides only what more text could not change, so the boundaries between pieces
make no difference.
"""

import json
import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

from quire.cluster.dialects.values import is_sendable

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

_SPACES = re.compile(r"\s*")
_JSON = re.compile(r"[\"'{}\[\]<`]")
_PYTHON = re.compile(r"[\"'(){}\[\],]")
"""Characters that matter in a value outside its strings. Marks that end JSON begin with < or `."""
_INSIDE = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_SCALAR = re.compile(r"[^\s,}\]]*")


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_fed = 0
        self._is_ended = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self._num_fed += 1

    def end(self) -> None:
        """Declares that no more text will arrive."""
        self._is_ended = True

    def record(self) -> None:
        """Records the text read from here on, until `recorded` or `forget`."""
        self._record = []

    def recorded(self) -> str:
        """The text read since `record`; empty after `forget`. Ends the recording."""
        text, self._record = "".join(self._record or ()), None
        return text

    def forget(self) -> None:
        self._record = None

    def put_back(self, text: str) -> None:
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:  # The text precedes the last piece.
            self._text = text + self._text[self._at :]
            self._at = 0

    def peek(self) -> Reading[str]:
        """The next character; empty at the end of the text."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def literal(self, text: str, *, take: bool = True) -> Reading[bool]:
        """Whether ``text`` comes next. If so, it is consumed, unless ``take`` is false."""
        while True:
            rest = self._text[self._at : self._at + len(text)]
            if rest == text:
                if take:
                    self._take(self._at + len(text))
                return True
            if not text.startswith(rest) or not (yield from self._more()):
                return False

    def spaces(self) -> Reading[None]:
        """Consumes all whitespace that comes next."""
        yield from self.run(_SPACES)

    def run(self, pattern: re.Pattern[str], *, max_chars: int | None = None) -> Reading[str]:
        """Reads the longest run of characters that match ``pattern``, a repeated character
        class."""
        read: list[str] = []
        num_chars = 0
        while max_chars is None or num_chars <= max_chars:
            found = pattern.match(self._text, self._at)
            assert found is not None, "it matches nothing, too"
            read.append(self._take(found.end()))
            num_chars += len(read[-1])
            if self._at < len(self._text) or not (yield from self._more()):
                break
        return "".join(read)

    def until(self, markers: tuple[str, ...], sink: Sink) -> Reading[str | None]:
        """Reads up to and including the first of ``markers``, and returns that marker; ``None`` at
        the end of the text. ``sink`` receives the text before the marker as soon as it cannot be
        part of one."""
        pattern = _any_of(markers)
        while True:
            found = pattern.search(self._text, self._at) if markers else None
            if found is not None:
                if found.start() > self._at:
                    sink(self._take(found.start()))
                return self._take(found.end())
            num_held = max((self._overlap(marker) for marker in markers), default=0)
            if len(self._text) - num_held > self._at:
                sink(self._take(len(self._text) - num_held))
            if not (yield from self._more()):
                if self._at < len(self._text):
                    sink(self._take(len(self._text)))
                return None

    def json_value(self, sink: Sink) -> Reading[bool]:
        """Reads one JSON value as written, into ``sink``; returns whether it was whole."""
        first = yield from self.peek()
        if first in '{["' and first:
            return (yield from self._balanced(sink, _JSON))
        text = yield from self.run(_SCALAR)
        sink(text)
        return bool(text) and bool((yield from self.peek()))

    def json_string(self) -> Reading[str | None]:
        """Reads a JSON string and returns its value; ``None`` if there is none."""
        if (yield from self.peek()) != '"':
            return None
        raw: list[str] = []
        yield from self._balanced(raw.append, _JSON)
        try:
            text = str(json.loads("".join(raw), strict=False))
        except ValueError:
            return None
        return text if is_sendable(text) else None

    def python_value(self, sink: Sink) -> Reading[bool]:
        """Reads up to the comma or parenthesis that ends a Python argument; returns whether one
        did."""
        return (yield from self._balanced(sink, _PYTHON))

    def _balanced(self, sink: Sink, outside: re.Pattern[str]) -> Reading[bool]:
        """Reads a JSON list, object or string to its end, or a Python value up to the comma or
        closing bracket outside its own brackets. Models write single quotes in either."""
        depth, quote, is_escaped = 0, "", False
        while True:
            at = self._at
            if is_escaped and at < len(self._text):
                at, is_escaped = at + 1, False
            while found := (_INSIDE[quote] if quote else outside).search(self._text, at):
                at, char = found.end(), found[0]
                if char == "\\":
                    is_escaped = at == len(self._text)
                    at += not is_escaped
                elif char in "\"'":
                    quote = "" if quote else char
                elif char in "([{":
                    depth += 1
                elif char in "<`" or depth == 0:  # JSON begins with a bracket or quote.
                    sink(self._take(at - 1))
                    return outside is _PYTHON
                elif char != ",":
                    depth -= 1
                if outside is _JSON and depth == 0 and not quote and char != "\\":
                    sink(self._take(at))
                    return True
            if self._at < len(self._text):
                sink(self._take(len(self._text)))
            if not (yield from self._more()):
                return False

    def _more(self) -> Reading[bool]:
        """Waits for text; returns whether there is any."""
        num_fed = self._num_fed
        while self._num_fed == num_fed:
            if self._is_ended:
                return False
            yield
        return True

    def _take(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        if self._record is not None:
            self._record.append(text)
        return text

    def _overlap(self, marker: str) -> int:
        """The length of the longest prefix of ``marker`` at the end of the text."""
        for length in range(min(len(self._text) - self._at, len(marker) - 1), 0, -1):
            if self._text.endswith(marker[:length]):
                return length
        return 0


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
