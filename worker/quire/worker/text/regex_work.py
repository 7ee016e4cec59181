"""Reads regular expressions, in the syntax of Rust's ``regex``, for the work of compiling them."""

import re
from dataclasses import dataclass

from quire.worker.text.work import Work

_CAP = 10**9
_TOKEN = re.compile(
    r"""
      \\(?P<unicode>[pP])(?:\{[^}]{0,64}\}|.)?
    | \\(?P<words>[wW])
    | \\(?:x\{[^}]{0,16}\}|x..|u\{[^}]{0,16}\}|u.{4}|U.{8}|.)
    | (?P<open>\()(?:\?(?:P?<\w{1,64}>|[a-zA-Z-]{0,16}:))?
    | (?P<class>\[)
    | (?P<repeat>[?*+]|\{\d{0,20}(?:,\d{0,20})?\})
    | (?P<close>\))
    | (?P<or>\|)
    | (?P<plain>[^\\()\[{?*+|]+)
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS = re.compile(
    r"\\(?P<unicode>[pP])|\\(?P<words>[wW])|\\.|(?P<open>\[)|(?P<close>\])|(?P<wide>[^\x00-\x7f])|.",
    re.DOTALL,
)


@dataclass(slots=True)
class Size:
    """``length``: characters of the longest alternative, each part as often as it must be there;
    ``optional``: parts that may be missing."""

    length: int = 0
    optional: int = 0

    def then(self, other: "Size") -> "Size":
        length = min(self.length + other.length, _CAP)
        return Size(length, min(self.optional + other.optional, _CAP))

    def repeated(self, bounds: str) -> "Size":
        """``bounds``: ``?``, ``*``, ``+``, or one or two numbers in braces."""
        least = "1" if bounds == "+" else bounds.strip("{}~?* ").split(",")[0].strip()
        digits = least.lstrip("0") if least.isascii() and least.isdigit() else ""
        times = int(digits or "0") if len(digits) < 10 else _CAP
        length = min(self.length * times, _CAP)
        return Size(length, min(self.optional * max(times, 1) + (times == 0), _CAP))

    def add_to(self, work: Work) -> None:
        """A part that may be missing is looked at with every other one."""
        if self.length:
            work.add(
                "characters that must follow one another", self.length / 20, number=self.length
            )
        if self.optional:
            work.add("optional parts in one text", self.optional**2 / 2_500, number=self.optional)


class Sum:
    """Alternatives of parts in a row."""

    def __init__(self) -> None:
        self._longest = 0
        self._row = Size()
        self._last = Size()

    def append(self, part: Size) -> None:
        self._row = self._row.then(self._last)
        self._last = part

    def repeat(self, bounds: str) -> None:
        """The last part is there that often."""
        self._last = self._last.repeated(bounds)

    def alternative(self) -> None:
        self.append(Size())
        self._longest = max(self._longest, self._row.length)
        self._row = Size(0, self._row.optional)

    def total(self) -> Size:
        self.alternative()
        return Size(self._longest, self._row.optional)


def check_regex(pattern: str) -> None:
    """Raises ValueError: compiling it would take too long."""
    work = Work()
    regex_size(pattern, work).add_to(work)
    work.check(len(pattern.encode()))


def regex_size(pattern: str, work: Work) -> Size:
    """Adds what classes of characters take to ``work``."""
    groups = [Sum()]
    at = 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        assert found
        at = found.end()
        kind = found.lastgroup
        if kind == "open":
            groups.append(Sum())
        elif kind == "close" and len(groups) > 1:
            inner = groups.pop().total()
            groups[-1].append(inner)
        elif kind == "or":
            groups[-1].alternative()
        elif kind == "repeat":
            groups[-1].repeat(found[0])
        elif kind == "plain":
            groups[-1].append(Size(len(found[0]) - 1))
            groups[-1].append(Size(1))
        else:
            if kind == "class":
                at = _read_class(pattern, at, work)
            _add_class(kind, work)
            groups[-1].append(Size(1))
    while len(groups) > 1:  # It is refused for what it is.
        inner = groups.pop().total()
        groups[-1].append(inner)
    return groups[0].total()


def _read_class(pattern: str, at: int, work: Work) -> int:
    """The end of a class that begins before ``at``."""
    depth, begin = 1, at
    while depth and at < len(pattern):
        found = _IN_CLASS.match(pattern, at)
        assert found
        is_first = at == begin or (at == begin + 1 and pattern[begin] == "^")
        at = found.end()
        if found.lastgroup == "open":
            depth += 1
        elif found.lastgroup == "close" and not is_first:
            depth -= 1
        _add_class(found.lastgroup, work)
    return at


def _add_class(kind: str | None, work: Work) -> None:
    if kind == "unicode":
        work.add("classes of Unicode", 0.8)
    elif kind == "words":
        work.add("classes of Unicode", 0.2)
    elif kind == "wide":
        work.add("characters in classes", 0.3)
