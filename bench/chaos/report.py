"""The fault matrix as Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.chaos.verdicts import Outcome


@dataclass(frozen=True, kw_only=True)
class Row:
    fault: str
    promised: str
    outcome: Outcome


def matrix(rows: Sequence[Row]) -> Iterator[str]:
    yield "| fault | promised | seen | holds |"
    yield "|---|---|---|---|"
    for row in rows:
        outcome = row.outcome
        seen = "; ".join([*outcome.seen, *(f"**{what}**" for what in outcome.broken)])
        holds = "no" if outcome.broken else "yes" if outcome.was_run else "not run"
        cells = (row.fault, row.promised, seen, holds)
        yield "| " + " | ".join(_cell(text) for text in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
