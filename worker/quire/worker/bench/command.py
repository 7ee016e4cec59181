"""The commands behind ``quire bench prefix`` and ``quire bench blocksize``."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from quire.worker.bench import plot, report
from quire.worker.bench.summary import Row, summarize
from quire.worker.bench.sweep import SweepConfig, run_sweep
from quire.worker.bench.workload import Workload
from quire.worker.model.hub import model_name

PlotFormat = Literal["png", "svg"]


Kind = Literal["prefix", "blocksize"]
"""Compare prefix caching on and off, or compare block sizes."""

_TABLES = {"prefix": report.prefix_table, "blocksize": report.block_size_table}
_PLOTS = {"prefix": plot.plot_prefix, "blocksize": plot.plot_block_sizes}


def bench(
    kind: Kind, config: SweepConfig, workload: Workload, *, output: Path, plot_format: PlotFormat
) -> int:
    """Runs the measurements, prints a table, writes JSON and a plot; returns the exit status."""
    report.check_writable(output)
    rows = _sweep(config, workload)
    print(_TABLES[kind](rows))
    _finish(kind, config, workload, rows, output=output, plot_format=plot_format)
    return 0


def _sweep(config: SweepConfig, workload: Workload) -> list[Row]:
    print(f"{_title(config, workload)}\nall KV unshared: {workload.num_tokens} tokens = 100%")
    runs = run_sweep(config, workload, progress=lambda line: print(line, file=sys.stderr))
    return summarize(runs, workload)


def _title(config: SweepConfig, workload: Workload) -> str:
    return f"{model_name(config.engine.model)}, {workload.title}"


def _finish(
    kind: Kind,
    config: SweepConfig,
    workload: Workload,
    rows: Sequence[Row],
    *,
    output: Path,
    plot_format: PlotFormat,
) -> None:
    print("\n" + "\n".join(report.closing_lines(rows)))
    settings: dict[str, Any] = {
        "benchmark": kind,
        "workload": {
            "title": workload.title,
            "num_requests": len(workload.items),
            "num_tokens": workload.num_tokens,
        },
        "repeats": config.repeats,
        "concurrency": config.concurrency,
        "engine": {**asdict(config.engine), "model": str(config.engine.model)},
    }
    json_file = output.with_name(f"{output.name}.json")
    report.write_json(json_file, settings=settings, rows=rows)
    print(f"wrote {json_file}")
    if not plot.has_matplotlib():
        print(f"no plot: that needs matplotlib ({plot.INSTALL})")
        return
    picture = output.with_name(f"{output.name}.{plot_format}")
    _PLOTS[kind](rows, picture, title=_title(config, workload))
    print(f"wrote {picture}")
