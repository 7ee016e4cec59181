"""Writes the table in Markdown, and its figures in JSON, from which a later run continues."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.peers.checkpoints import SHAPES, Shape
from bench.peers.floor import Limits, floor_seconds
from bench.peers.measure import CALM, Failure, Measured, Run, Settings
from bench.peers.peers import OURS
from bench.peers.workloads import WORKLOADS, Workload
from bench.provenance import cpu
from bench.report import markdown

RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True, kw_only=True)
class About:
    """Date, machine and subject of a run."""

    date: str
    machine: str
    num_threads: int
    limits: Limits


def describe(*, num_threads: int, limits: Limits) -> About:
    return About(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{cpu()}, {platform.system()}",
        num_threads=num_threads,
        limits=limits,
    )


def table(measured: Measured, about: About) -> str:
    """A row for each workload and model: ours, each peer, and how ours compares."""
    known = dict.fromkeys(engine for _, _, engine in measured.runs)
    engines = [OURS, *(name for name in known if name != OURS)]
    peers = engines[1:]
    about_row = ["workload", "model", "requests", "unit"]
    head = [*about_row, OURS, *peers, "best peer", "ours / best", "floor", "ours / floor"]
    lines = []
    for workload in WORKLOADS.values():
        for shape in SHAPES.values():
            figures = {name: measured.median(shape, workload, name) for name in engines}
            marks = [_mark(measured.counting(shape, workload, name)) for name in engines]
            if any(figures.values()):
                lines.append(_cells(workload, shape, figures, marks, about.limits))
    return markdown(head, lines, num_left=len(about_row)) + "\n"


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
        str(workload.num_requests(shape)),
        workload.unit,
        *(_number(value) + mark for value, mark in zip(figures.values(), marks, strict=True)),
        best or "",
        f"{ours / known[best]:.2f}{marked[OURS] or marked[best]}" if ours and best else "",
        _number(floor),
        f"{ours / floor:.2f}{marked[OURS]}" if ours and floor else "",
    ]


def write_results(
    path: Path, text: str, measured: Measured, about: About, settings: Settings
) -> None:
    """Writes the table to ``path``, which ends in .md, and the figures beside it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(_prose(about, measured, settings) + "\n" + text)
    content = {
        "about": asdict(about),
        "versions": measured.versions,
        "agreed": measured.agreed,
        "figures": [
            {
                "model": model,
                "workload": workload,
                "engine": engine,
                "runs": [run._asdict() for run in runs],
            }
            for (model, workload, engine), runs in measured.runs.items()
            if runs
        ],
        "failures": [failure._asdict() for failure in measured.failures],
    }
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


def read_results(path: Path, *, repeats: int) -> tuple[Measured, Limits]:
    """Reads what `write_results` wrote."""
    content = json.loads(path.with_suffix(".json").read_text())
    measured = Measured(
        repeats=repeats,
        agreed=content["agreed"],
        runs={
            (figure["model"], figure["workload"], figure["engine"]): [
                Run(**run) for run in figure["runs"]
            ]
            for figure in content["figures"]
        },
        failures=[Failure(**failure) for failure in content["failures"]],
        versions=content["versions"],
    )
    return measured, Limits(**content["about"]["limits"])


def _prose(about: About, measured: Measured, settings: Settings) -> str:
    limits = about.limits
    gemm = {name: f"{rate / 1e9:.0f}" for name, rate in limits.gemm_flops.items()}
    versions = [
        f"- {engine}: {', '.join(f'{name} {version}' for name, version in packages.items())}"
        for engine, packages in measured.versions.items()
    ]
    failures = [f"- no figures: {failure.describe()}" for failure in measured.failures]
    commits = {run.commit: None for runs in measured.runs.values() for run in runs}
    limits_read = f"DRAM {limits.dram_bytes_per_s / 1e9:.0f} GB/s"
    if limits.cache_bytes:
        limits_read += (
            f", the last cache of {limits.cache_bytes >> 20} MiB "
            f"{limits.cache_bytes_per_s / 1e9:.0f} GB/s"
        )
    return "\n".join(
        [
            f"# Quire and its peers, {about.date}",
            "",
            f"`python -m bench.peers` at commit {', '.join(commits)}, on {about.machine}; "
            f"{about.num_threads} threads, bfloat16 unless said. Engines in turn, medians of "
            f"{settings.repeats}; what takes longer than {settings.patience_s:.0f} s once only. "
            f"Figures with * were disturbed: other processes took more than {CALM:.0%} of the "
            "machine's CPU time in the median of their runs; so are ratios of such figures, which "
            "say little where one engine was disturbed more than another. Medians over all runs: "
            f"{_disturbances(measured)}.",
            "",
            f"Limits measured in the same runs: GEMM {gemm['bfloat16']} GFLOP/s in bfloat16 and "
            f"{gemm['float32']} in float32; {limits_read}. `bench/peers/floor.py` says what the "
            "floor counts. For times (ms, s) less is better.",
            *_against_own_bf16(measured),
            "",
            *versions,
            *failures,
            "",
        ]
    )


def _against_own_bf16(measured: Measured) -> list[str]:
    """Ours quantized beside ours in bfloat16, on the same prompts."""
    lines = []
    for name, other in (("int8", "decode"), ("w4", "decode"), ("w4-stream", "stream")):
        ratios = []
        for shape in SHAPES.values():
            figures = [measured.median(shape, WORKLOADS[each], OURS) for each in (name, other)]
            if figures[0] and figures[1]:
                ratios.append(f"{shape.name} {figures[0] / figures[1]:.2f}")
        if ratios:
            lines += ["", f"Ours, {name} / {other} in bfloat16: {', '.join(ratios)}."]
    return lines


def _disturbances(measured: Measured) -> str:
    """Other processes' CPU time while each engine was measured."""
    shares: dict[str, list[float]] = {}
    for (_, _, engine), runs in measured.runs.items():
        known = [run.disturbance for run in runs if run.disturbance is not None]
        shares.setdefault(engine, []).extend(known)
    return ", ".join(
        f"{engine} {statistics.median(known):.0%}" for engine, known in shares.items() if known
    )


def _mark(runs: Sequence[Run]) -> str:
    disturbed = statistics.median(run.disturbance or 0.0 for run in runs) > CALM if runs else False
    return "*" if disturbed else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
