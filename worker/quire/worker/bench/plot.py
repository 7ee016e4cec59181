"""Plots a sweep: measurements as solid lines, their bounds as dashed lines of the same colour.

Needs matplotlib, which the extra ``bench`` installs.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.worker.bench.reuse import PLACES, ReuseRow
from quire.worker.bench.summary import Row
from quire.worker.request.errors import ConfigError

INSTALL = "pip install matplotlib"

_COLOURS = ("#1f5fa8", "#d1661a", "#2f8a4c", "#8a4fa0", "#8c6d1f", "#5b6770")
_GREY = "#555555"


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    try:
        import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def plot_prefix(rows: Sequence[Row], file: Path, *, title: str) -> None:
    """Four panels over the block size, a colour per cache size; the suffix says PNG or SVG."""
    figure, panels = _figure(title, num_rows=2, num_columns=2)
    (speedup, throughput), (hits, fragmentation) = panels

    _lines(speedup, rows, lambda row: _speedups(row)[0])
    _lines(speedup, rows, lambda row: _speedups(row)[1], style="--")
    _plot(speedup, rows, lambda row: _speedups(row)[2], _GREY, ":")
    speedup.axhline(1, color=_GREY, linewidth=0.8)
    _dress(speedup, "Speedup by prefix caching", "uncached ÷ cached time")
    _explain(speedup, {"-": "measured", "--": "bound at its hit rate", ":": "bound, endless cache"})

    _lines(throughput, rows, lambda row: row.cached.output_tokens_per_s)
    _lines(throughput, rows, _uncached_throughput, style="--")
    _dress(throughput, "Throughput", "output tokens/s")
    _explain(throughput, {"-": "prefix caching on", "--": "off"})

    _hit_panel(hits, rows)
    _fragmentation_panel(fragmentation, rows)
    _save(figure, file)


def plot_reuse(rows: Sequence[ReuseRow], file: Path, *, title: str) -> None:
    """Time to the first token by prefix length, a line for each place that had the prefix, and as a
    share of the time to compute it."""
    figure, (times, shares) = _figure(title, num_rows=1, num_columns=2)
    lengths = [row.num_tokens for row in rows]
    for number, place in enumerate(PLACES):
        colour = _GREY if place == "computed" else _COLOURS[number - 1]
        times.plot(
            lengths, [1e3 * row.seconds[place] for row in rows], "o-", color=colour, label=place
        )
        if place != "computed":
            shares.plot(lengths, [row.share(place) for row in rows], "o-", color=colour)
    for panel, name, unit in (
        (times, "Time to the first token", "ms"),
        (shares, "Share of computing the prompt", ""),
    ):
        panel.set_title(name)
        panel.set_xlabel("tokens of the prefix")
        panel.set_ylabel(unit)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.grid(alpha=0.3)
    times.legend()
    _save(figure, file)


def plot_block_sizes(rows: Sequence[Row], file: Path, *, title: str) -> None:
    """Four panels over the block size, a colour per cache size."""
    figure, panels = _figure(title, num_rows=2, num_columns=2)
    (throughput, peak), (hits, fragmentation) = panels
    _lines(throughput, rows, lambda row: row.cached.output_tokens_per_s)
    _dress(throughput, "Throughput", "output tokens/s")
    _lines(peak, rows, lambda row: row.cached.num_peak_blocks * row.cell.block_size)
    _dress(peak, "Most KV held at a time", "slots in held blocks")
    _hit_panel(hits, rows)
    _fragmentation_panel(fragmentation, rows)
    _save(figure, file)


def _hit_panel(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, lambda row: 100 * row.cached.hit_rate)
    _plot(axes, rows, lambda row: 100 * row.infinite_hit_rate, "black", ":")
    _dress(axes, "Hit rate", "% of prompt tokens", top=105)
    _explain(axes, {"-": "measured", ":": "endless cache"})


def _fragmentation_panel(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, lambda row: 100 * row.cached.fragmentation)
    _dress(axes, "Fragmentation", "wasted slots, % of held slots")


def _figure(title: str, *, num_rows: int, num_columns: int) -> tuple[Any, Any]:
    try:
        module: Any = import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(f"a plot needs matplotlib: {INSTALL}") from None
    figure = module.Figure(figsize=(6 * num_columns, 4.2 * num_rows), layout="constrained")
    figure.suptitle(title, fontsize=12)
    return figure, figure.subplots(num_rows, num_columns)


def _lines(
    axes: Any,
    rows: Sequence[Row],
    value: Callable[[Row], float],
    *,
    style: str = "-",
) -> None:
    """A line for each cache size."""
    cache_sizes = list(dict.fromkeys(row.cell.cache_size for row in rows))
    for index, cache_size in enumerate(cache_sizes):
        mine = [row for row in rows if row.cell.cache_size == cache_size]
        colour = _COLOURS[index % len(_COLOURS)]
        _plot(axes, mine, value, colour, style, label=f"cache {cache_size}")


def _plot(
    axes: Any,
    rows: Sequence[Row],
    value: Callable[[Row], float],
    colour: str,
    style: str,
    *,
    label: str | None = None,
) -> None:
    """Plots one line. If several cache sizes have a value at a block size, the largest counts."""
    values: dict[int, float] = {}
    for row in rows:
        block_size = row.cell.block_size
        values[block_size] = max(values.get(block_size, 0.0), value(row))
    points = sorted(values.items())
    axes.plot(
        [block_size for block_size, _ in points],
        [height for _, height in points],
        color=colour,
        linestyle=style,
        marker="o" if style == "-" else None,
        markersize=4,
        linewidth=1.8 if style == "-" else 1.4,
        label=label,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), labels=[str(block_size) for block_size in values])
    axes.minorticks_off()


def _dress(axes: Any, title: str, unit: str, *, top: float | None = None) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("block size, tokens")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0, top=top)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _explain(axes: Any, styles: dict[str, str]) -> None:
    """Adds a legend of a panel's line styles; the figure's legend explains colours."""
    handles = [
        axes.plot([], [], color=_GREY, linestyle=style, label=meaning)[0]
        for style, meaning in styles.items()
    ]
    axes.legend(handles=handles, fontsize=8, framealpha=0.8, edgecolor="none")


def _speedups(row: Row) -> tuple[float, float, float]:
    assert row.speedup is not None
    return row.speedup.measured, row.speedup.bound, row.speedup.infinite_bound


def _uncached_throughput(row: Row) -> float:
    assert row.uncached is not None
    return row.uncached.output_tokens_per_s


def _save(figure: Any, file: Path) -> None:
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}: give another --output") from None
