"""Formats rows in columns that fit the terminal; without a terminal, columns are not limited."""

import shutil
import sys
from collections.abc import Sequence
from textwrap import fill, wrap

_GAP = 2


def terminal_width() -> int | None:
    """The width of the terminal at standard output; ``None`` if that is a pipe or a file, whose
    reader wants one line per row."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Formats rows, which have equal numbers of cells, in columns. If they are wider than
    ``width``, cells of the widest columns are wrapped."""
    return "\n".join(table_rows(rows, width=width))


def table_rows(rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """The formatted rows of `table`, one entry per row."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        words = [[len(word) for cell in column for word in cell.split()] for column in columns]
        room = width - _GAP * (len(widths) - 1)
        # Words are broken only if nothing else makes enough room.
        for least in ([max(each, default=0) for each in words], [1] * len(widths)):
            _shrink(widths, least, room)
    return [_row(row, widths) for row in rows]


def paragraph(text: str, *, width: int | None, indent: str = "") -> str:
    """``text`` wrapped to ``width``, with ``indent`` before each line."""
    if width is None:
        return indent + text
    return fill(text, width, initial_indent=indent, subsequent_indent=indent)


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Narrows the widest columns until all fit into ``room`` or have the ``least`` width."""
    while sum(widths) > room:
        excess, widest = max(
            (size if size > floor else 0, place)
            for place, (size, floor) in enumerate(zip(widths, least, strict=True))
        )
        if not excess:
            return
        widths[widest] -= 1


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    wrapped = [
        [cell] if len(cell) <= width else wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = [
        [lines[number] if number < len(lines) else "" for lines in wrapped]
        for number in range(max(map(len, wrapped)))
    ]
    return "\n".join(
        (" " * _GAP)
        .join(part.ljust(width) for part, width in zip(line, widths, strict=True))
        .rstrip()
        for line in lines
    )
