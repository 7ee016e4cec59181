"""Compares how streams ended to the guarantees, and tabulates the results. No side effects."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.report import markdown_row
from bench.serving.load import Stream, differences

Reference = Mapping[str, Sequence[int]]
"""The expected tokens of each request, by its name."""

_SHOWN = 4  # Errors of one kind.


@dataclass(kw_only=True)
class Outcome:
    """The observations of a fault, for a row of the matrix."""

    seen: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """The broken guarantees; empty if all held."""
    was_run: bool = True

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


def check_exact(outcome: Outcome, streams: Sequence[Stream], reference: Reference) -> None:
    """Checks that all streams completed with the expected tokens."""
    wrong = differences(streams, reference)
    failed = [stream for stream in streams if not stream.is_complete]
    num_exact = sum(
        stream.is_complete and stream.tokens == list(reference[stream.request.name])
        for stream in streams
    )
    outcome.seen.append(f"{num_exact}/{len(streams)} exact")
    errors = sorted({f"{stream.error}" for stream in failed})
    outcome.check(not wrong, f"{len(wrong)} inexact: {'; '.join(wrong[:_SHOWN])}")
    outcome.check(not failed, f"{len(failed)} failed: {'; '.join(errors[:_SHOWN])}")


def check_gap(outcome: Outcome, streams: Sequence[Stream], *, bound_s: float, why: str) -> None:
    gap_s = max((stream.largest_gap_s for stream in streams), default=0.0)
    outcome.seen.append(f"largest gap {gap_s:.2f} s (bound {bound_s:.2f} s: {why})")
    outcome.check(gap_s <= bound_s, f"a gap of {gap_s:.2f} s")


def check_clean_ends(
    outcome: Outcome, streams: Sequence[Stream], reference: Reference, *, codes: Sequence[str]
) -> None:
    """Those that failed say so with one of ``codes``, and what they brought was right."""
    failed = [stream for stream in streams if not stream.is_complete]
    wrong = differences(streams, reference)
    short = [
        stream.request.name
        for stream in streams
        if stream.is_complete and len(stream.tokens) != len(reference[stream.request.name])
    ]
    errors: dict[str, int] = {}
    for stream in failed:
        code = f"{stream.error}".partition(":")[0]
        errors[code] = errors.get(code, 0) + 1
    outcome.seen += [f"{count} × {code}" for code, count in sorted(errors.items())]
    outcome.check({*errors} <= {*codes}, f"errors other than {', '.join(codes)}: {errors}")
    outcome.check(not wrong, f"{len(wrong)} inexact: {'; '.join(wrong[:_SHOWN])}")
    outcome.check(not short, f"ended as if complete: {', '.join(short[:_SHOWN])}")


def num_under_way(streams: Sequence[Stream], at_s: float) -> int:
    """Number of streams that had begun and not ended."""
    return sum(bool(s.times) and s.times[0] <= at_s < s.ended_s for s in streams)


def tokens_to_recompute(streams: Sequence[Stream], *, group: str, at_s: float) -> int:
    """Prompt and output so far of those that ran on ``group``, as their first group."""
    return sum(
        len(stream.request.token_ids) + sum(time_s <= at_s for time_s in stream.times)
        for stream in streams
        if stream.group == group and stream.sent_s <= at_s < stream.ended_s
    )


class Row(NamedTuple):
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
        yield markdown_row(map(_cell, cells))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
