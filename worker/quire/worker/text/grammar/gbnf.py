"""Parses grammars in llama.cpp's syntax (GBNF).

    root ::= "a" digit+ | [^"\\]{2,4}   # a comment
    digit ::= [0-9]

Terminals are single characters: a text is a sequence of them. A rule ends with its line, except
within parentheses and before or after ``|``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_MAX_DEPTH = 50
"""Most parentheses within each other."""
_MAX_TIMES = 100_000
_SPACE = re.compile(r"(?:[ \t]|\#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|\#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_TIMES = re.compile(r"\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}")
_ESCAPE = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt])|([!-/:-@[-`{-~])"
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, eq=False)
class Characters:
    """One character in any of these ranges, which are sorted and do not overlap."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Rule:
    name: str


@dataclass(frozen=True, eq=False)
class Sequence:
    parts: tuple["Node", ...]


@dataclass(frozen=True, eq=False)
class Choice:
    options: tuple["Node", ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    node: "Node"
    least: int
    most: int | None


Node = Characters | Rule | Sequence | Choice | Repeat


def parse(grammar: str) -> dict[str, Node]:
    """The rules by name. Each rule that is referred to is there, and so is ``root``.

    Raises:
        ValueError: The grammar is invalid. The message names the line.
    """
    return _Parser(grammar).rules()


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(parts):
            return parts
        case Choice(options):
            return options
        case Repeat(inner):
            return (inner,)
    return ()


def rules_in(node: Node) -> Iterator[str]:
    """The names of the rules that ``node`` refers to."""
    if isinstance(node, Rule):
        yield node.name
    for child in children(node):
        yield from rules_in(child)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._uses: dict[str, tuple[Rule, int]] = {}
        """References to rules, and where the first one is."""
        self._classes: dict[tuple[tuple[int, int], ...], Characters] = {}

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            began = self._at
            name = self._name("the name of a rule")
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._error("expected ::=")
            if name in rules:
                raise self._error(f"the rule {name!r} is defined twice", began)
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._choice()
            self._skip(_SPACE)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._error("expected the end of the rule")
            self._skip(_SPACE_AND_LINES)
        for name, (_, used) in self._uses.items():
            if name not in rules:
                raise self._error(f"the rule {name!r} is not defined", used)
        if "root" not in rules:
            raise ValueError("the grammar has no rule 'root', with which each text begins")
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while True:
            before = self._at
            self._skip(_SPACE_AND_LINES)
            if self._peek() != "|":
                self._at = before
                return options[0] if len(options) == 1 else Choice(tuple(options))
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence())

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (found := self._part()) is not None:
            self._skip(self._space)
            times = self._times()
            parts.append(found if times is None else _repeated(found, *times))
            self._skip(self._space)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    @property
    def _space(self) -> re.Pattern[str]:
        return _SPACE_AND_LINES if self._depth else _SPACE

    def _part(self) -> Node | None:
        """The next part of a sequence; ``None`` behind the last one."""
        sign = self._peek()
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if sign == "(":
            return self._group()
        if sign == ".":
            self._at += 1
            return self._characters((0, _LAST_CHARACTER))
        if sign in ("<", "!"):
            raise self._error("tokens are not supported: write their text")
        if _NAME.match(self._text, self._at):
            began = self._at
            name = self._name("a name")
            return self._uses.setdefault(name, (Rule(name), began))[0]
        return None

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} parentheses within each other")
        began = self._at
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        node = self._choice()
        self._skip(_SPACE_AND_LINES)
        if self._peek() != ")":
            raise self._error("this parenthesis is not closed", began)
        self._at += 1
        self._depth -= 1
        return node

    def _literal(self) -> Node:
        began = self._at
        self._at += 1
        characters = []
        while self._peek() != '"':
            character = self._character(began)
            characters.append(self._characters((character, character)))
        self._at += 1
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))

    def _class(self) -> Node:
        began = self._at
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges = []
        while self._peek() != "]":
            first = last = self._character(began)
            if self._peek() == "-" and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character(began)
                if last < first:
                    raise self._error(f"the range {chr(first)!r} to {chr(last)!r} is empty", began)
            ranges.append((first, last))
        self._at += 1
        merged = _merged(ranges)
        if is_negated:
            merged = _others(merged)
        if not ranges or not merged:
            raise self._error("a class of no characters", began)
        return self._characters(*merged)

    def _characters(self, *ranges: tuple[int, int]) -> Characters:
        return self._classes.setdefault(ranges, Characters(ranges))

    def _character(self, began: int) -> int:
        """The code of the next character of a text or class, which began at ``began``."""
        sign = self._peek()
        if sign == "":
            raise self._error("this text or class is not closed", began)
        self._at += 1
        if sign != "\\":
            return ord(sign)
        found = _ESCAPE.match(self._text, self._at)
        if not found:
            shown = self._text[self._at - 1 : self._at + 1]
            raise self._error(f"{shown!r} is no escape, or lacks digits", self._at - 1)
        code = found[1] or found[2] or found[3]
        value = int(code, 16) if code else ord(_CONTROLS.get(found[0], found[0]))
        if value > _LAST_CHARACTER or _SURROGATES[0] <= value <= _SURROGATES[1]:
            raise self._error(f"'\\{found[0]}' is no character of Unicode", self._at - 1)
        self._at = found.end()
        return value

    def _times(self) -> tuple[int, int | None] | None:
        sign = self._peek()
        if sign in _SIGNS:
            self._at += 1
            return _SIGNS[sign]
        if sign != "{":
            return None
        found = _TIMES.match(self._text, self._at)
        if not found:
            raise self._error("expected {m}, {m,} or {m,n}")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if max(least, most or 0) > _MAX_TIMES:
            raise self._error(f"{found[0]} repeats more than {_MAX_TIMES} times")
        if most is not None and most < least:
            raise self._error(f"{found[0]} repeats at least {least} and at most {most} times")
        self._at = found.end()
        return least, most

    def _name(self, expected: str) -> str:
        found = _NAME.match(self._text, self._at)
        if not found:
            raise self._error(f"expected {expected}")
        self._at = found.end()
        return found[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _error(self, reason: str, at: int | None = None) -> ValueError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        rest = self._text[at : at + 20].splitlines()
        found = f" at {rest[0]!r}" if rest and rest[0] else ""
        return ValueError(f"line {line}{found}: {reason}")


def _repeated(node: Node, least: int, most: int | None) -> Node:
    if most == 0:
        return Sequence(())
    return node if (least, most) == (1, 1) else Repeat(node, least, most)


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _others(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The characters that ``ranges`` lack."""
    starts = [0, *(last + 1 for _, last in ranges)]
    ends = [*(first - 1 for first, _ in ranges), _LAST_CHARACTER]
    return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start <= end)
