"""Parts of a grammar in llama.cpp's syntax as finite automata, and sets of their characters.

Sets of characters and of positions are the bits of integers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

from quire.worker.text.grammar.gbnf import Characters, Node, Repeat, children


@dataclass(frozen=True)
class Terminal:
    """A part of the grammar as a pattern, and as a Glushkov automaton of which more texts may be
    part: it does not count repetitions."""

    pattern: str
    characters: list[int]
    """The characters of each position."""
    first: int
    """The positions at which a text begins."""
    last: int
    """The positions at which a text ends."""
    after: list[int]
    """The positions behind each position."""
    is_empty: bool
    """Whether one text is empty."""


class Alphabet:
    """Numbers the sets of characters between which a grammar distinguishes."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        starts = {0}
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            waiting += children(node)
            if isinstance(node, Characters):
                for first, last in node.ranges:
                    starts |= {first, last + 1}
        self._starts = sorted(starts)
        self._leads: dict[int, int] = {0: 0}

    def bits(self, node: Characters) -> int:
        bits = 0
        for first, last in node.ranges:
            low, high = bisect_left(self._starts, first), bisect_left(self._starts, last + 1)
            bits |= (1 << high) - (1 << low)
        return bits

    def leads(self, characters: int) -> int:
        """The first bytes of the characters in UTF-8. The lexer reads bytes, so that two characters
        with the same first byte are not told apart in time."""
        if characters not in self._leads:
            ends = [*self._starts[1:], _END]
            found = 0
            for index in bits_of(characters):
                low, high = _lead(self._starts[index]), _lead(ends[index] - 1)
                found |= (2 << high) - (1 << low)
            self._leads[characters] = found
        return self._leads[characters]


_END = 0x110000


def _lead(code: int) -> int:
    """The first byte of a character in UTF-8."""
    if code < 0x80:
        return code
    if code < 0x800:
        return 0xC0 | code >> 6
    return 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18


def joined(parts: list[Terminal]) -> Terminal:
    """The parts behind each other."""
    characters: list[int] = []
    after: list[int] = []
    first = last = 0
    is_empty = True
    for part in parts:
        at = len(characters)
        begins = part.first << at
        for position in bits_of(last):
            after[position] |= begins
        characters += part.characters
        after += (each << at for each in part.after)
        first |= begins if is_empty else 0
        last = part.last << at | (last if part.is_empty else 0)
        is_empty = is_empty and part.is_empty
    pattern = "".join(part.pattern for part in parts)
    return Terminal(pattern, characters, first, last, after, is_empty)


def chosen(parts: list[Terminal]) -> Terminal:
    """One of the parts."""
    characters: list[int] = []
    after: list[int] = []
    first = last = 0
    for part in parts:
        at = len(characters)
        characters += part.characters
        after += (each << at for each in part.after)
        first |= part.first << at
        last |= part.last << at
    pattern = f"(?:{'|'.join(part.pattern for part in parts)})"
    is_empty = any(part.is_empty for part in parts)
    return Terminal(pattern, characters, first, last, after, is_empty)


def repeated(part: Terminal, node: Repeat) -> Terminal:
    after = part.after
    if node.most != 1:
        after = [
            each | (part.first if part.last >> position & 1 else 0)
            for position, each in enumerate(after)
        ]
    pattern = f"(?:{part.pattern}){times(node.least, node.most)}"
    is_empty = part.is_empty or node.least == 0
    return Terminal(pattern, part.characters, part.first, part.last, after, is_empty)


def times(least: int, most: int | None) -> str:
    if most is None and least < 2:
        return "+" if least else "*"
    return "?" if (least, most) == (0, 1) else f"{{{least},{'' if most is None else most}}}"


def pattern_of(node: Characters) -> str:
    ranges = (
        f"\\x{{{first:x}}}" if first == last else f"\\x{{{first:x}}}-\\x{{{last:x}}}"
        for first, last in node.ranges
    )
    return f"[{''.join(ranges)}]"


def union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def bits_of(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def union_at(sets: list[int], positions: int) -> int:
    """The union of the sets at ``positions``."""
    return union(sets[position] for position in bits_of(positions))
