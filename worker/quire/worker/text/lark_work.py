"""Reads grammars in Lark's syntax, with llguidance's extensions, for the work of compiling them."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.worker.text.json_schema import DECODER, add_schema
from quire.worker.text.regex_work import Size, Sum, regex_size
from quire.worker.text.work import TOO_LONG, Work, check_chain

_MAX_AND = 5
"""Each operand multiplies the work of one step, which no fuel interrupts."""
_MIN_BRANCHES, _BYTES_A_BRANCH, _MAX_BRANCHES = 3_000, 25, 6_000
"""Most branches of rules: alternatives, and twice each part that may be missing or repeated. One
place of an output may have as many items, and each is compared with all others."""

_STRING = r'"(?:\\.|[^"\\])*"'
_REGEX = r"/(?:\\.|[^/\\])+/"
_NAME = r"(?:!?[_?]?[a-z]|_?[A-Z])[\w-]*"
_TOKEN = re.compile(
    rf"""
      (?P<space>[ \t\r\n]+|(?://|\#)[^\n]*)
    | (?P<string>{_STRING})
    | (?P<regex>{_REGEX})
    | (?P<json>%json)
    | (?P<data>%(?:regex|llguidance))
    | (?P<ignore>%ignore)
    | (?P<lark>%lark)
    | (?P<name>{_NAME})
    | (?P<repeat>[?*+]|~\s*\d+|\{{\s*\d*\s*(?:,\s*\d*\s*)?\}})
    | (?P<open>[(\[])
    | (?P<close>[)\]])
    | (?P<begin>\{{)
    | (?P<end>\}})
    | (?P<or>\|)
    | (?P<and>&)
    | (?P<special><[^<>\s]+>|@[\w-]+)
    | (?P<pair>::)
    | (?P<colon>:)
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_BLANK = re.compile(r"\s*")
_Part = Size | str | tuple[str, str]
"""A text or expression, the name of a terminal, or an operator and its text."""


@dataclass(slots=True)
class _Definition:
    names: set[str] = field(default_factory=set)
    parts: list[_Part] = field(default_factory=list)
    num_levels: int = 1


def check_lark(grammar: str, *, is_ours: bool = False) -> None:
    """``is_ours``: `quire.worker.text.lark` wrote it, whose ``&`` only exclude some texts.

    Raises:
        ValueError: Compiling it would take too long, or a schema in it is not supported.
    """
    read = _Reader(grammar)
    if read.num_and > _MAX_AND and not is_ours:
        raise ValueError(f"{read.num_and} operators &: {TOO_LONG}: at most {_MAX_AND}")
    definitions = read.definitions
    order = check_chain(
        {name: each.num_levels for name, each in definitions.items()},
        {name: each.names for name, each in definitions.items()},
    )
    sizes: dict[str, Size] = {}
    used: set[str] = set()
    num_branches = 0
    for name in order:
        definition = definitions[name]
        if _is_terminal(name):
            sizes[name] = _size(definition.parts, sizes)
            continue
        operators = Counter(part[0] for part in definition.parts if isinstance(part, tuple))
        num_branches += operators["or"] + 2 * operators["repeat"]
        used |= {each for each in definition.names if _is_terminal(each)}
        for part in definition.parts:
            if isinstance(part, Size):
                part.add_to(read.work)
    for name in used & sizes.keys():
        sizes[name].add_to(read.work)
    num_bytes = len(grammar.encode())
    most = min(max(_MIN_BRANCHES, num_bytes // _BYTES_A_BRANCH), _MAX_BRANCHES)
    if num_branches > most:
        raise ValueError(
            f"rules branch {num_branches} times: {TOO_LONG}: at most {most}, besides terminals"
        )
    read.work.add("definitions", 2 * len(definitions), number=len(definitions))
    read.work.check(num_bytes)


class _Reader:
    """The definitions of a grammar. A name that begins a line may begin one: a colon tells."""

    def __init__(self, grammar: str) -> None:
        self.work = Work()
        self.num_and = 0
        self.definitions: dict[str, _Definition] = {}
        self._now = _Definition()
        self._begun: tuple[str, _Definition] | None = None
        """What may be the head of a definition."""
        self._depth = 0
        self._begins_line = True
        self._outer: list[_Definition] = []
        at = 0
        while at < len(grammar):
            found = _TOKEN.match(grammar, at)
            assert found
            kind = found.lastgroup or ""
            at = found.end()
            if kind == "colon" and not self._colon():
                raise ValueError(f"{grammar[max(at - 40, 0) : at]!r} is not read as a definition")
            if kind in ("json", "data"):
                at = self._data(grammar, at, is_schema=kind == "json")
            elif kind != "space":
                self._token(kind, found[0])
            if kind != "space":
                self._begins_line = kind in ("begin", "end")
            elif "\n" in found[0]:
                self._begins_line = True
        self._flush()

    def _token(self, kind: str, text: str) -> None:
        name = text.lstrip("!?")
        if kind == "name" and self._begins_line and not self._depth:
            self._flush()
            self._begun = (name, _Definition())
        elif kind == "ignore":
            self._flush()
            self._now = self._defined("%ignore")
        elif kind == "lark":
            self._to.names.add("start")
        elif kind == "begin":
            self._flush()
            self._outer.append(self._now)
        elif kind == "end" and self._outer:
            self._flush()
            self._now = self._outer.pop()
        elif kind == "name":
            self._to.names.add(name)
            self._to.parts.append(name)
        elif kind == "string":
            self._to.parts.append(Size(len(text) - 2))
        elif kind == "regex":
            self._to.parts.append(regex_size(text[1:-1], self.work))
        elif kind == "special":
            self._to.parts.append(Size(1))
        elif kind in ("open", "close", "repeat", "or"):
            self._depth = max(0, self._depth + {"open": 1, "close": -1}.get(kind, 0))
            self._to.num_levels = max(self._to.num_levels, 1 + self._depth)
            self._to.parts.append((kind, text))
            if text == "]":
                self._to.parts.append(("repeat", "?"))
        self.num_and += kind == "and"

    @property
    def _to(self) -> _Definition:
        return self._begun[1] if self._begun else self._now

    def _colon(self) -> bool:
        """Whether it may stand here: behind the head of a definition, or in a range of bits."""
        if self._depth:
            return True
        if self._begun is None:
            return False
        name, head = self._begun
        self._begun = None
        self._now = self._defined(name)
        self._merge(head)
        return True

    def _flush(self) -> None:
        """What may have been the head of a definition was none."""
        if self._begun is not None:
            name, found = self._begun
            self._begun = None
            self._now.names.add(name)
            self._now.parts.append(name)
            self._merge(found)
        self._depth = 0

    def _merge(self, found: _Definition) -> None:
        self._now.names |= found.names
        self._now.parts += found.parts
        self._now.num_levels = max(self._now.num_levels, found.num_levels)

    def _defined(self, name: str) -> _Definition:
        definition = self.definitions.setdefault(name, _Definition())
        definition.parts.append(("or", "|"))  # Behind an earlier one of the same name.
        return definition

    def _data(self, grammar: str, at: int, *, is_schema: bool) -> int:
        """The end of JSON that begins behind ``at``."""
        begin = _BLANK.match(grammar, at)
        assert begin
        try:
            value, end = DECODER.raw_decode(grammar, begin.end())
        except (ValueError, RecursionError):
            return at  # It is refused for what it is.
        if is_schema:
            add_schema(value, self.work)
        self._to.parts.append(Size(1))
        return end


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _size(parts: list[_Part], sizes: Mapping[str, Size]) -> Size:
    """The size of a terminal, with those it refers to in their places."""
    groups = [Sum()]
    for part in parts:
        if isinstance(part, Size):
            groups[-1].append(part)
        elif isinstance(part, str):
            groups[-1].append(sizes.get(part, Size(1)))
        elif part[0] == "open":
            groups.append(Sum())
        elif part[0] == "close" and len(groups) > 1:
            inner = groups.pop().total()
            groups[-1].append(inner)
        elif part[0] == "or":
            groups[-1].alternative()
        elif part[0] == "repeat":
            groups[-1].repeat(part[1])
    while len(groups) > 1:
        inner = groups.pop().total()
        groups[-1].append(inner)
    return groups[0].total()
