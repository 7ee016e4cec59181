"""Helpers that benchmarks share: command lines, tables, percentiles."""

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A table whose first ``num_left`` columns are to the left and the others to the right."""
    rule = ["---"] * num_left + ["---:"] * (len(header) - num_left)
    return "\n".join(map(markdown_row, (header, rule, *rows)))


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def command(module: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m module``, whose help is the docstring as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawTextHelpFormatter,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of the values; NaN if there are none."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def names(known: Collection[str], *, or_none: bool = False) -> Callable[[str], list[str]]:
    """The type of an argument that is some of ``known``, with commas; nothing if ``or_none``."""

    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        unknown = [name for name in chosen if name not in known]
        if unknown or not (chosen or or_none):
            told = ", ".join(unknown) or "names"
            raise argparse.ArgumentTypeError(f"no {told}; there are {', '.join(known)}")
        return chosen

    return parse
