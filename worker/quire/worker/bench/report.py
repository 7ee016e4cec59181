"""Formats a sweep's results as tables, and writes them as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.worker.bench.summary import Figures, Row
from quire.worker.request.errors import ConfigError


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table with columns as wide as their widest cell; numbers are right-aligned."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def prefix_table(rows: Sequence[Row]) -> str:
    """A table with two lines per row: without prefix caching, and with it and its bounds."""
    header = (
        *("block", "cache", "caching", "out tok/s", "all tok/s", "speedup", "bound", "reached"),
        *("hits", "hits ∞", "lost", "evicted", "preempted", "wasted"),
        *("TTFT ms mean", "p50", "p99"),
    )
    lines: list[list[str]] = []
    for row in rows:
        assert row.uncached is not None
        assert row.speedup is not None
        cell, speedup = row.cell, row.speedup
        first = [str(cell.block_size), cell.cache_size, "off"]
        lines.append(first + _throughput(row.uncached) + [""] * 6 + _rest(row.uncached))
        middle = [
            f"{speedup.measured:.2f}x",
            f"{speedup.bound:.2f}x",
            f"{speedup.reached:.0%}",
            f"{row.cached.hit_rate:.1%}",
            f"{row.infinite_hit_rate:.1%}",
            f"{row.lost_rate:.1%}",
        ]
        lines.append(
            [
                str(cell.block_size),
                cell.cache_size,
                "on",
                *_throughput(row.cached),
                *middle,
                *_rest(row.cached),
            ]
        )
    return format_table(header, lines)


def block_size_table(rows: Sequence[Row]) -> str:
    """A table with one line per row, with throughput also as a share of the best."""
    header = (
        *("block", "cache", "out tok/s", "all tok/s", "of best", "hits", "hits ∞", "lost"),
        *(
            "peak blocks",
            "of cache",
            "evicted",
            "preempted",
            "wasted",
            "TTFT ms mean",
            "p50",
            "p99",
        ),
    )
    best = max(row.cached.output_tokens_per_s for row in rows)
    lines = [
        [
            str(row.cell.block_size),
            row.cell.cache_size,
            *_throughput(row.cached),
            f"{row.cached.output_tokens_per_s / best:.0%}",
            f"{row.cached.hit_rate:.1%}",
            f"{row.infinite_hit_rate:.1%}",
            f"{row.lost_rate:.1%}",
            f"{row.cached.num_peak_blocks:.0f}",
            f"{row.cached.num_peak_blocks / row.cell.num_blocks:.0%}",
            *_rest(row.cached),
        ]
        for row in rows
    ]
    return format_table(header, lines)


def closing_lines(rows: Sequence[Row]) -> list[str]:
    """Lines that explain the table's terms and say whether caching changed any token."""
    lines = [
        "hits: prompt tokens found in the cache; hits ∞: in a cache that never evicts",
        "lost: prompt tokens that such a cache misses because a prefix ends inside a block",
        "wasted: slots of held blocks without a token (fragmentation), over all steps",
    ]
    speedups = [row.speedup for row in rows if row.speedup is not None]
    if speedups:
        lines.insert(
            0, "bound: the speedup if hits cost nothing, other prompt tokens what they do without"
        )
        num_different = max(speedup.num_different_outputs for speedup in speedups)
        lines.append(
            "every request's tokens are the same with and without prefix caching"
            if num_different == 0
            else f"WARNING: the tokens of up to {num_different} requests differ between runs"
        )
    return lines


def check_writable(output: Path) -> None:
    """Checks, before anything is measured, that the results can be written.

    Raises:
        ConfigError: The folder of ``output`` does not exist.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"no folder {output.parent}: make it, or give another --output")


def write_json(file: Path, *, settings: dict[str, Any], rows: Sequence[Any]) -> None:
    """Writes all values of the table, unrounded, and the settings of the run.

    Each of ``rows`` is a dataclass.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_text(file, json.dumps({**settings, "rows": [asdict(row) for row in rows]}, indent=1))


def write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}: give another --output") from None


def _throughput(figures: Figures) -> list[str]:
    return [f"{figures.output_tokens_per_s:.0f}", f"{figures.total_tokens_per_s:.0f}"]


def _rest(figures: Figures) -> list[str]:
    return [
        f"{figures.num_evictions:.0f}",
        f"{figures.num_preemptions:.0f}",
        f"{figures.fragmentation:.1%}",
        f"{figures.ttft_mean_ms:.0f}",
        f"{figures.ttft_p50_ms:.0f}",
        f"{figures.ttft_p99_ms:.0f}",
    ]
