"""Converts the loose JSON that models write to strict JSON, in pieces of any size."""

import json
import re

CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Python's constants in JSON."""

_MAX_SCALAR_CHARS = 400
_TOKEN = re.compile(r"[ \t\n\r]+|[{}\[\],:\"']|[\w.+-]+")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_STRING = re.compile(r"[\"'\x00-\x1f]|\\(u[0-9a-fA-F]{4}|.|\Z)", re.DOTALL)
_UNDECIDED = re.compile(r"\\(u[0-9a-fA-F]{0,3})?\Z")
_ESCAPES = set('"\\/bfnrtu')
_CLOSES = {"{": "}", "[": "]"}


def written(text: str) -> str:
    """A part of a string's text with JSON escapes, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StrictJson:
    """Converts one value. Models write text that JSON does not allow: line breaks and other control
    characters in strings, unknown escapes, strings in single quotes, trailing commas, and Python's
    constants. The output of `strict` is always the beginning of a JSON value; it stops where the
    text is not a value."""

    def __init__(self) -> None:
        self._is_broken = False
        self._closes: list[str] = []
        self._wants = "value"  # Next: "value", a key, a colon or a comma.
        self._may_close = False
        self._quote = ""  # The quote of the open string.
        self._comma: list[str] = []  # Held, with the space after it, until a value follows.
        self._held = ""  # Text that the next piece may continue.

    @property
    def is_whole(self) -> bool:
        is_ended = self._wants == "comma" and not self._closes
        return is_ended and not self._is_broken and not self._held

    def strict(self, text: str) -> str:
        """The next piece as strict JSON."""
        text, self._held = self._held + text, ""
        told: list[str] = []
        at = 0
        while at < len(text) and not self._is_broken:
            at = (self._in_string if self._quote else self._outside)(text, at, told)
        return "".join(told)

    def _in_string(self, text: str, at: int, told: list[str]) -> int:
        found = _IN_STRING.search(text, at)
        if found is None:
            told.append(text[at:])
            return len(text)
        told.append(text[at : found.start()])
        mark = found[0]
        if _UNDECIDED.match(text, found.start()):
            self._held = text[found.start() :]
            return len(text)
        if mark == self._quote:
            told.append('"')
            self._quote = ""
            is_key = self._wants == "key"
            self._wants = "colon" if is_key else "comma"
            self._may_close = bool(self._closes) and not is_key
        elif mark[0] != "\\":
            told.append(mark if mark == "'" else written(mark))
        elif mark == "\\'":
            told.append("'")
        else:
            is_known = mark[1] in _ESCAPES and mark != "\\u"
            told.append(mark if is_known else f"\\\\{written(mark[1:])}")
        return found.end()

    def _outside(self, text: str, at: int, told: list[str]) -> int:
        found = _TOKEN.match(text, at)
        if found is None:
            self._is_broken = True
            return len(text)
        token, end = found[0], found.end()
        if token.isspace():
            (self._comma or told).append(token)
        elif token in "}]":
            self._is_broken = not self._may_close or self._closes.pop() != token
            self._comma.clear()
            self._tell(token, told, wants="comma", may_close=bool(self._closes))
        elif token == ",":
            self._is_broken = self._wants != "comma" or not self._closes
            if not self._is_broken:
                self._comma.append(token)
                self._wants = "key" if self._closes[-1] == "}" else "value"
        elif token == ":":
            self._is_broken = self._wants != "colon"
            self._tell(token, told, wants="value", may_close=False)
        elif self._wants not in (("key", "value") if token in "\"'" else ("value",)):
            self._is_broken = True
        elif token in "\"'":
            self._quote = token
            self._tell('"', told, wants=self._wants, may_close=bool(self._closes))
        elif token in "{[":
            self._closes.append(_CLOSES[token])
            self._tell(token, told, wants="key" if token == "{" else "value", may_close=True)
        elif end == len(text) and len(token) <= _MAX_SCALAR_CHARS:
            self._held = token
        else:
            value = CONSTANTS.get(token, token)
            self._is_broken = _SCALAR.fullmatch(value) is None
            self._tell(value, told, wants="comma", may_close=bool(self._closes))
        return end

    def _tell(self, text: str, told: list[str], *, wants: str, may_close: bool) -> None:
        if not self._is_broken:
            told += (*self._comma, text)
            self._comma.clear()
            self._wants, self._may_close = wants, may_close
