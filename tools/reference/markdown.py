"""Formats Markdown tables."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells may contain any text without line breaks."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
