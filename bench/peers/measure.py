"""The measurements: engines in turn on one checkpoint, every round in another order.

One process of each engine lives for a model and dtype, paused while it is another one's turn.
After ``repeats`` rounds, an engine of which fewer measurements were undisturbed by other processes
gets more rounds, `MAX_ROUNDS` times as many at most; the median of its ``repeats`` least disturbed
ones counts. What took longer than ``patience_s`` is not repeated. An engine that does not answer
within ``timeout_s`` is out for that model and dtype; as the shortest workloads come first, it loses
only what it cannot do in time.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.peers.checkpoints import Shape
from bench.peers.peers import OURS, Engine
from bench.peers.process import EngineFailed, EngineProcess
from bench.peers.workloads import WORKLOADS, Prompt, Workload

NUM_COMPARED = 4
MAX_ROUNDS = 3
CALM = 0.05


class TokensDiffer(Exception):
    """Two engines computed other tokens in fp32: what they would be timed on is not one model."""


class Run(NamedTuple):
    """A measurement."""

    seconds: float
    disturbance: float | None
    """What other processes took of the machine's CPU time, 0 to 1."""

    @property
    def calm(self) -> bool:
        return (self.disturbance or 0.0) <= CALM


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run measures."""

    repeats: int
    patience_s: float
    timeout_s: float
    num_threads: int
    logs: Path


@dataclass(kw_only=True)
class Measured:
    """All figures of a run."""

    repeats: int
    runs: dict[tuple[str, str, str], list[Run]] = field(default_factory=dict)
    """By model, workload and engine."""
    failures: dict[str, str] = field(default_factory=dict)
    """By "engine model dtype": why there are no figures."""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of packages, by engine."""

    def median(self, shape: Shape, workload: Workload, engine: str) -> float | None:
        """In the workload's unit."""
        runs = self.counting(shape, workload, engine)
        return workload.figure(statistics.median(r.seconds for r in runs), shape) if runs else None

    def counting(self, shape: Shape, workload: Workload, engine: str) -> list[Run]:
        """The least disturbed runs."""
        runs = self.runs.get((shape.name, workload.name, engine), [])
        return sorted(runs, key=lambda run: run.disturbance or 0.0)[: self.repeats]


def check_tokens(
    engines: Sequence[Engine], shape: Shape, checkpoint: Path, settings: Settings
) -> list[str]:
    """Runs a few prompts in fp32 through all engines. Returns the names of those that agree.

    A peer that does not run in fp32 is left out, and said so on stderr.

    Raises:
        TokensDiffer: An engine answered other tokens than ours.
        EngineFailed: Ours did not answer.
    """
    workload = WORKLOADS["fp32"]
    prompts = workload.prompts(shape, seed=-1)[0][:NUM_COMPARED]
    answers: dict[str, list[Prompt]] = {}
    for engine in engines:
        try:
            with _start(engine, checkpoint, "float32", settings) as process:
                answers[engine.name] = process.run(prompts, new_tokens=workload.new_tokens)[1]
        except EngineFailed as error:
            if engine.name == OURS:
                raise
            print(f"{engine.name} does not run in fp32: {error}", file=sys.stderr)
    for name, tokens in answers.items():
        for number, (ours, theirs) in enumerate(zip(answers[OURS], tokens, strict=True)):
            if ours != theirs:
                raise TokensDiffer(
                    f"{OURS} and {name} differ in fp32, prompt {number}: {ours} and {theirs}"
                )
    return list(answers)


class Contest:
    """Engines on one model in one dtype. Adds to ``measured``; `close` it."""

    def __init__(
        self,
        engines: Sequence[Engine],
        shape: Shape,
        checkpoint: Path,
        *,
        dtype: str,
        settings: Settings,
        measured: Measured,
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._shape = shape
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._settings = settings
        self._measured = measured
        self._processes: dict[str, EngineProcess] = {}

    def run(self, workloads: Sequence[Workload]) -> None:
        """Measures ``workloads``, all of this contest's dtype."""
        starts = [workload for workload in workloads if workload.fresh_process]
        for name in self._engines:
            self._start(name, starts)
        for workload in workloads:
            if not workload.fresh_process:
                for number in range(self._settings.repeats * MAX_ROUNDS):
                    names = list(self._engines)
                    first = number % len(names)
                    for name in names[first:] + names[:first]:
                        self._measure(name, workload, number)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def _start(self, name: str, starts: Sequence[Workload]) -> None:
        """Starts an engine, as often as starts are measured, and keeps the last process."""
        try:
            for number in range(self._settings.repeats if starts else 1):
                if name in self._processes:
                    self._processes.pop(name).close()
                process = _start(self._engines[name], self._checkpoint, self._dtype, self._settings)
                self._processes[name] = process
                self._measured.versions[name] = process.versions
                prompts, _ = WORKLOADS["start"].prompts(self._shape, seed=number)
                process.run(prompts, new_tokens=1)
                seconds = time.perf_counter() - process.begun
                for workload in starts:
                    run = Run(seconds, process.bystanders.share())
                    self._record(name, workload, run)
                if seconds > self._settings.patience_s:
                    break
            # Kernels for the shapes to come are chosen and compiled outside the measurements.
            process.run(WORKLOADS["decode"].prompts(self._shape, seed=-2)[0], new_tokens=8)
        except EngineFailed as error:
            self._give_up(name, "start", error)

    def _measure(self, name: str, workload: Workload, number: int) -> None:
        process = self._processes.get(name)
        runs = self._runs(name, workload)
        if (
            process is None
            or any(run.seconds > self._settings.patience_s for run in runs)
            or sum(run.calm for run in runs) >= self._settings.repeats
        ):
            return
        prompts, before = workload.prompts(self._shape, seed=number)
        try:
            seconds, _ = process.run(prompts, before=before, new_tokens=workload.new_tokens)
        except EngineFailed as error:
            self._give_up(name, workload.name, error)
        else:
            self._record(name, workload, Run(seconds, process.disturbance))

    def _runs(self, name: str, workload: Workload) -> list[Run]:
        return self._measured.runs.setdefault((self._shape.name, workload.name, name), [])

    def _record(self, name: str, workload: Workload, run: Run) -> None:
        self._runs(name, workload).append(run)
        figure = workload.figure(run.seconds, self._shape)
        line = f"{self._shape.name} {workload.name:12} {name:12} {figure:9.1f} {workload.unit}"
        if not run.calm:
            line += f"   disturbed: {run.disturbance:.0%}"
        print(line, file=sys.stderr, flush=True)

    def _give_up(self, name: str, workload: str, error: EngineFailed) -> None:
        what = f"{name}, {self._shape.name}, {self._dtype}, from {workload} on"
        print(f"{what}: {error}", file=sys.stderr, flush=True)
        self._measured.failures[what] = str(error).splitlines()[0]  # The log has paths.
        if name in self._processes:
            self._processes.pop(name).close()


def _start(engine: Engine, checkpoint: Path, dtype: str, settings: Settings) -> EngineProcess:
    return EngineProcess(
        engine,
        checkpoint,
        dtype=dtype,
        num_threads=settings.num_threads,
        timeout_s=settings.timeout_s,
        log=settings.logs / f"{engine.name}-{checkpoint.name}-{dtype}.log",
    )
