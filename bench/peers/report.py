"""The table of a run, in markdown, and the file of its figures, in JSON."""

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.peers.checkpoints import Shape
from bench.peers.floor import Limits, floor_seconds
from bench.peers.measure import CALM, Measured, Run, Settings
from bench.peers.peers import OURS
from bench.peers.workloads import Workload

RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True, kw_only=True)
class About:
    """When, where and of what a run was."""

    date: str
    commit: str
    """Ends in "+" where files differed from it."""
    machine: str
    num_threads: int
    limits: Limits


def describe(*, num_threads: int, limits: Limits) -> About:
    return About(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=_git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "-s") else ""),
        machine=_machine(),
        num_threads=num_threads,
        limits=limits,
    )


def table(
    measured: Measured,
    about: About,
    shapes: Sequence[Shape],
    workloads: Sequence[Workload],
    engines: Sequence[str],
) -> str:
    """A row for each workload and model: ours, each peer, and how ours compares."""
    peers = [name for name in engines if name != OURS]
    head = ["workload", "model", "unit", OURS, *peers, "best peer", "ours / best", "floor"]
    lines = [
        _row([*head, "ours / floor"]),
        _row(["---", "---", "---", *["---:"] * (len(head) - 2)]),
    ]
    for workload in workloads:
        for shape in shapes:
            figures = {name: measured.median(shape, workload, name) for name in engines}
            marks = [_mark(measured.counting(shape, workload, name)) for name in engines]
            if any(figures.values()):
                lines.append(_row(_cells(workload, shape, figures, marks, about.limits)))
    return "\n".join(lines) + "\n"


def _cells(
    workload: Workload,
    shape: Shape,
    figures: dict[str, float | None],
    marks: list[str],
    limits: Limits,
) -> list[str]:
    ours = figures.get(OURS)
    marked = dict(zip(figures, marks, strict=True))
    rates = workload.unit == "tokens/s"
    known = {name: value for name, value in figures.items() if value and name != OURS}
    best = (max if rates else min)(known, key=lambda name: known[name], default=None)
    seconds = floor_seconds(workload, shape, limits)
    floor = None if seconds is None else workload.figure(seconds, shape)
    return [
        workload.title,
        shape.name,
        workload.unit,
        *(_number(value) + mark for value, mark in zip(figures.values(), marks, strict=True)),
        best or "",
        f"{ours / known[best]:.2f}{marked[OURS] or marked[best]}" if ours and best else "",
        _number(floor),
        f"{ours / floor:.2f}{marked[OURS]}" if ours and floor else "",
    ]


def write_results(
    text: str, measured: Measured, about: About, settings: Settings, *, name: str
) -> Path:
    """Writes ``<date>-<name>.md`` and ``.json`` into bench/results; returns the former."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{about.date}-{name}.md"
    path.write_text(_prose(about, measured, settings) + "\n" + text)
    figures = [
        {
            "model": model,
            "workload": workload,
            "engine": engine,
            "runs": [run._asdict() for run in runs],
        }
        for (model, workload, engine), runs in measured.runs.items()
        if runs
    ]
    content = {
        "about": asdict(about),
        "versions": measured.versions,
        "figures": figures,
        "failures": measured.failures,
    }
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    return path


def _prose(about: About, measured: Measured, settings: Settings) -> str:
    limits = about.limits
    gemm = {name: f"{rate / 1e9:.0f}" for name, rate in limits.gemm_flops.items()}
    versions = [
        f"- {engine}: {', '.join(f'{name} {version}' for name, version in packages.items())}"
        for engine, packages in measured.versions.items()
    ]
    failures = [f"- no figures: {what}: {why}" for what, why in measured.failures.items()]
    return "\n".join(
        [
            f"# Quire and its peers, {about.date}",
            "",
            f"`python -m bench.peers` at commit {about.commit}, on {about.machine}; "
            f"{about.num_threads} threads, bfloat16 unless said. Engines in turn, medians of "
            f"{settings.repeats}; what takes longer than {settings.patience_s:.0f} s once only. "
            f"Figures with * were disturbed: other processes took more than {CALM:.0%} of the "
            "machine's CPU time in the median of their runs; so are ratios of such figures, which "
            "say little where one engine was disturbed more than another. Medians over all runs: "
            f"{_disturbances(measured)}.",
            "",
            f"Limits measured in this run: GEMM {gemm['bfloat16']} GFLOP/s in bfloat16 and "
            f"{gemm['float32']} in float32, DRAM {limits.dram_bytes_per_s / 1e9:.0f} GB/s; "
            "`bench/peers/floor.py` says what the floor counts. For times (ms, s) less is better.",
            "",
            *versions,
            *failures,
            "",
        ]
    )


def _disturbances(measured: Measured) -> str:
    """What other processes took while each engine was measured."""
    shares: dict[str, list[float]] = {}
    for (_, _, engine), runs in measured.runs.items():
        known = [run.disturbance for run in runs if run.disturbance is not None]
        shares.setdefault(engine, []).extend(known)
    return ", ".join(
        f"{engine} {statistics.median(known):.0%}" for engine, known in shares.items() if known
    )


def _machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {platform.system()}"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _mark(runs: Sequence[Run]) -> str:
    disturbed = statistics.median(run.disturbance or 0.0 for run in runs) > CALM if runs else False
    return "*" if disturbed else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
