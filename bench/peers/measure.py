"""The measurements: engines in turn on one checkpoint, every round in another order.

One process of each engine lives for a model and dtype, paused while it is another one's turn.
After ``repeats`` rounds, an engine of which fewer measurements were undisturbed by other processes
gets more rounds, `MAX_ROUNDS` times as many at most; the median of its ``repeats`` least disturbed
ones counts. What took longer than ``patience_s`` is not repeated. An engine that does not answer
within ``timeout_s`` is out for that model and dtype; as the shortest workloads come first, it loses
only what it cannot do in time.

What an earlier run of the benchmark measured counts too: only what is missing is measured, and
only engines of which something is missing are started.
"""

import math
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


class OutOfTime(Exception):
    """The run's own time is up: what is missing is for the next one."""


class Run(NamedTuple):
    """One measurement."""

    seconds: float
    disturbance: float | None
    """Other processes' share of the machine's CPU time, 0 to 1."""
    commit: str = ""
    """This repository's commit when the measurement was made."""

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
    commit: str = ""
    """This repository's commit, for the record."""
    deadline: float = math.inf
    """No measurement is begun after this, of `time.monotonic`."""


class Failure(NamedTuple):
    """An engine that gave no answer."""

    model: str
    dtype: str
    engine: str
    workload: str
    """The first of which there are no figures."""
    why: str

    def describe(self) -> str:
        return f"{self.engine}, {self.model}, {self.dtype}, from {self.workload} on: {self.why}"


@dataclass(kw_only=True)
class Measured:
    """All figures, those of earlier runs too where they were read."""

    repeats: int
    agreed: dict[str, str] = field(default_factory=dict)
    """By engine: the commit at which its tokens in fp32 were seen to be ours."""
    runs: dict[tuple[str, str, str], list[Run]] = field(default_factory=dict)
    """Measurements by model, workload and engine."""
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    """Package versions, by engine."""

    def median(self, shape: Shape, workload: Workload, engine: str) -> float | None:
        """The median figure, in the workload's unit."""
        runs = self.counting(shape, workload, engine)
        return workload.figure(statistics.median(r.seconds for r in runs), shape) if runs else None

    def counting(self, shape: Shape, workload: Workload, engine: str) -> list[Run]:
        """The least disturbed runs, of which the median is reported."""
        runs = self.runs.get((shape.name, workload.name, engine), [])
        return sorted(runs, key=lambda run: run.disturbance or 0.0)[: self.repeats]

    def forget_other_commits(self, engine: str, commit: str) -> None:
        """Drops the engine's runs and failures of all commits but one."""
        for key, runs in self.runs.items():
            if key[2] == engine:
                self.runs[key] = [run for run in runs if run.commit == commit]
        self.failures = [failure for failure in self.failures if failure.engine != engine]

    def is_missing(
        self, shape: Shape, workload: Workload, engine: Engine, patience_s: float
    ) -> bool:
        """Whether another measurement is wanted."""
        if workload.dtype not in engine.dtypes or any(
            (failure.model, failure.dtype, failure.engine)
            == (shape.name, workload.dtype, engine.name)
            for failure in self.failures
        ):
            return False
        runs = self.runs.get((shape.name, workload.name, engine.name), [])
        return (
            len(runs) < self.repeats * MAX_ROUNDS
            and all(run.seconds <= patience_s for run in runs)
            and sum(run.calm for run in runs) < self.repeats
        )


def check_tokens(
    engines: Sequence[Engine],
    shape: Shape,
    checkpoint: Path,
    settings: Settings,
    measured: Measured,
) -> None:
    """Runs a few prompts in fp32 through all engines, but for those that agreed at this commit.

    A peer that does not run in fp32 is left out, and said so on stderr.

    Raises:
        TokensDiffer: An engine answered other tokens than ours.
        EngineFailed: Ours did not answer.
    """
    unknown = [x for x in engines if measured.agreed.get(x.name) != settings.commit]
    if not unknown:
        return
    workload = WORKLOADS["fp32"]
    prompts = workload.prompts(shape, seed=-1)[0][:NUM_COMPARED]
    ours: list[Prompt] = []
    for engine in [engines[0], *(x for x in unknown if x is not engines[0])]:
        try:
            with _start(engine, checkpoint, "float32", settings) as process:
                answers = process.run(prompts, new_tokens=workload.new_tokens)[1]
        except EngineFailed as error:
            if engine is engines[0]:
                raise
            print(f"{engine.name} does not run in fp32: {error}", file=sys.stderr)
            continue
        ours = ours or answers
        for number, (expected, tokens) in enumerate(zip(ours, answers, strict=True)):
            if expected != tokens:
                raise TokensDiffer(
                    f"{OURS} and {engine.name} differ in fp32, prompt {number}: {expected} and "
                    f"{tokens}"
                )
        measured.agreed[engine.name] = settings.commit


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
        """Measures what is missing of ``workloads``, all of this contest's dtype.

        Raises:
            OutOfTime: Not all of it. Call it again in another run.
        """
        missing = [
            engine for engine in self._engines.values() if self._any_missing(engine, workloads)
        ]
        for engine in missing:
            self._start(engine, [workload for workload in workloads if workload.fresh_process])
        for workload in workloads:
            if not workload.fresh_process:
                for number in range(self._settings.repeats * MAX_ROUNDS):
                    first = number % max(1, len(missing))
                    for engine in missing[first:] + missing[:first]:
                        self._measure(engine, workload)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def _any_missing(self, engine: Engine, workloads: Sequence[Workload]) -> bool:
        return any(self._is_missing(engine, workload) for workload in workloads)

    def _is_missing(self, engine: Engine, workload: Workload) -> bool:
        patience_s = self._settings.patience_s
        return self._measured.is_missing(self._shape, workload, engine, patience_s)

    def _start(self, engine: Engine, starts: Sequence[Workload]) -> None:
        """Starts an engine, as often as starts are missing, and keeps the last process."""
        name = engine.name
        try:
            while name not in self._processes or self._any_missing(engine, starts):
                self._check_time()
                if name in self._processes:
                    self._processes.pop(name).close()
                process = _start(engine, self._checkpoint, self._dtype, self._settings)
                self._processes[name] = process
                self._measured.versions[name] = process.versions
                prompts, _ = WORKLOADS["start"].prompts(self._shape, seed=0)
                process.run(prompts, new_tokens=1)
                seconds = time.perf_counter() - process.begun
                share = process.disturbance_of_start()
                for workload in starts:
                    if self._is_missing(engine, workload):
                        self._record(engine, workload, seconds, share)
            # Kernels for the shapes to come are chosen and compiled outside the measurements.
            process.run(WORKLOADS["decode"].prompts(self._shape, seed=-2)[0], new_tokens=8)
        except EngineFailed as error:
            self._give_up(name, "start", error)

    def _measure(self, engine: Engine, workload: Workload) -> None:
        process = self._processes.get(engine.name)
        if process is None or not self._is_missing(engine, workload):
            return
        self._check_time()
        prompts, before = workload.prompts(self._shape, seed=len(self._runs(engine, workload)))
        try:
            seconds, _ = process.run(prompts, before=before, new_tokens=workload.new_tokens)
        except EngineFailed as error:
            self._give_up(engine.name, workload.name, error)
        else:
            self._record(engine, workload, seconds, process.disturbance)

    def _check_time(self) -> None:
        if time.monotonic() > self._settings.deadline:
            raise OutOfTime

    def _runs(self, engine: Engine, workload: Workload) -> list[Run]:
        return self._measured.runs.setdefault((self._shape.name, workload.name, engine.name), [])

    def _record(
        self, engine: Engine, workload: Workload, seconds: float, disturbance: float | None
    ) -> None:
        run = Run(seconds, disturbance, self._settings.commit)
        self._runs(engine, workload).append(run)
        figure = workload.figure(run.seconds, self._shape)
        line = f"{self._shape.name} {workload.name:12} {engine.name:12} {figure:9.1f} "
        line += workload.unit if run.calm else f"{workload.unit}   disturbed: {run.disturbance:.0%}"
        print(line, file=sys.stderr, flush=True)

    def _give_up(self, name: str, workload: str, error: EngineFailed) -> None:
        why = str(error).splitlines()[0]  # The log has paths.
        failure = Failure(self._shape.name, self._dtype, name, workload, why)
        print(f"{failure.describe()}\n{error}", file=sys.stderr, flush=True)
        self._measured.failures.append(failure)
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
