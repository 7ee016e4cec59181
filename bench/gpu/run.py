"""Checks and times every kernel and a whole model on a CUDA device, part by part.

    PYTHONPATH=kernels:worker python -m bench.gpu.run --out DIR [--budget-s N] [--parts NAME,...]
    python -m bench.gpu.run --check

Needs torch with CUDA, triton, and what the engine needs (for the model; not Ray). Each part is a
process of its own with a time limit, in the order of what would be missed most if the machine
were taken away; every figure is a line in ``DIR/gpu.jsonl`` as soon as it is known, and
``DIR/gpu.md`` is the table of all lines so far. A part that crashes is a fault in the table and
leaves the others alone; `bench.gpu.part` repeats the case that it died in, for instance under
``compute-sanitizer``.

``--budget-s`` ends the run in time: what no longer fits is said and left out, and a later call
with ``--parts`` and the same DIR goes on. ``--check`` runs all of it on a CPU, small: a test of
these scripts and of the memory that the full run will need, and of nothing else.

The exit status is 1 where a part failed or a kernel was wrong.
"""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.lines import Lines, read_lines, write_table
from bench.provenance import ROOT
from bench.report import command, names

_LAST_WORDS = 1500


@dataclass(frozen=True)
class Part:
    """One process, or several that share the part."""

    name: str
    work: str
    """The function, which takes a `bench.gpu.timings.Timer`; its module is in `bench.gpu`."""
    limit_s: float
    num_processes: int = 1

    def function(self) -> Callable[[Any], None]:
        """Imported late, since one of these modules may not import."""
        module, _, function = self.work.partition(".")
        work: Callable[[Any], None]
        work = getattr(importlib.import_module(f"bench.gpu.{module}"), function)
        return work


PARTS = (
    Part("probe", "part.probe", 120),
    Part("ceilings", "part.ceilings", 60),
    Part("warm", "checks.warm", 240, num_processes=12),
    Part("model", "model.model_timings", 420),
    Part("products", "invariance.check_products", 90),
    Part("free_products", "invariance.check_products", 90),
    Part("invariance", "invariance.check_model", 240),
    Part("free_model", "model.model_timings", 300),
    Part("attention", "timings.attention_timings", 240),
    Part("linear", "timings.linear_timings", 120),
    Part("streams", "timings.stream_timings", 120),
    Part("shared", "timings.shared_timings", 120),
    Part("profile", "profiling.profile_steps", 180),
    Part("variants", "variants.variant_timings", 420),
    Part("check", "checks.check", 540, num_processes=12),
    Part("peers", "peers.peer_timings", 300),
)


def run(parts: tuple[Part, ...], folder: Path, *, budget_s: float, is_dry: bool) -> None:
    """Runs the parts one after the other; faults and times are lines in ``folder``."""
    deadline_s = time.monotonic() + budget_s
    for part in parts:
        lines = Lines(folder, part.name)
        left_s = deadline_s - time.monotonic()
        if left_s < min(20, part.limit_s):
            lines.part(seconds=0, outcome=f"left out: {max(0, left_s):.0f} s were left")
            continue
        start = time.monotonic()
        outcome = _run_part(part, lines, folder, limit_s=min(part.limit_s, left_s), is_dry=is_dry)
        lines.part(seconds=time.monotonic() - start, outcome=outcome)
        write_table(folder)
    write_table(folder)


def _run_part(part: Part, lines: Lines, folder: Path, *, limit_s: float, is_dry: bool) -> str:
    """How it ended, in a word or two."""
    num_processes = 1 if is_dry else part.num_processes
    with tempfile.TemporaryDirectory() as logs:
        processes = []
        for number in range(num_processes):
            command = [*_command(part.name, folder, is_dry), "--share", f"{number}/{num_processes}"]
            with (Path(logs) / str(number)).open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=_environment(),
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        start_new_session=True,  # What it starts ends with it.
                    )
                )
        end_s = time.monotonic() + limit_s
        outcomes = []
        for number, process in enumerate(processes):
            try:
                status = process.wait(timeout=max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                outcomes.append(f"stopped after {limit_s:.0f} s")
                continue
            if status:
                words = (Path(logs) / str(number)).read_text()[-_LAST_WORDS:].strip()
                where = "its start"
                for line in lines.read():
                    if line["part"] == part.name and line["kind"] == "begin":
                        where = str(line["case"])
                last_line = words.splitlines()[-1] if words else ""
                lines.fault(f"the part, in {where}", f"status {status}: {last_line}\n{words}")
                outcomes.append(f"failed in {where}")
    return "; ".join(outcomes) or "done"


def _command(name: str, folder: Path, is_dry: bool) -> list[str]:
    command = [sys.executable, "-m", "bench.gpu.part", name, "--out", str(folder)]
    return [*command, "--dry"] if is_dry else command


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "worker"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def main(arguments: list[str] | None = None) -> int:
    parser = command("bench.gpu.run", __doc__)
    parser.add_argument("--out", type=Path, default=Path("quire-bench-gpu"))
    parser.add_argument("--budget-s", type=float, default=2700.0, help="for all parts together")
    known = [part.name for part in PARTS]
    parser.add_argument("--parts", type=names(known), default=known, help="by name, with commas")
    parser.add_argument("--check", action="store_true", help="a dry run on a CPU")
    options = parser.parse_args(arguments)
    parts = tuple(part for part in PARTS if part.name in options.parts)
    if not options.check and not importlib.import_module("torch").cuda.is_available():
        print("bench.gpu.run: torch finds no CUDA device; `--check` runs on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if options.check else options.out
        folder.mkdir(parents=True, exist_ok=True)
        run(parts, folder.resolve(), budget_s=options.budget_s, is_dry=options.check)
        lines = read_lines(folder)
        print((folder / "gpu.md").read_text())
    bad = [line for line in lines if line["kind"] == "fault"]
    failed = [
        line["part"]
        for line in lines
        if line["kind"] == "part" and line["outcome"].startswith(("failed", "stopped"))
    ]
    return int(bool(bad or failed))


if __name__ == "__main__":
    sys.exit(main())
