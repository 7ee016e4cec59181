"""Where the time of a step goes, part by part: ``quire bench step``.

Steps of three kinds and sizes: a batch of sequences that each decode one token, and one chunk of
a prompt. Between the steps the profile is read, so a step's time is that of `Engine.step` alone.
Where the ranks are processes, rank 0 reports what it spent; what is left of the wait for it is
the way there and back: unpickling, wake-ups, and the other ranks being slower.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from quire.worker import rank_process
from quire.worker.bench.report import format_table, write_json
from quire.worker.bench.step_parts import (
    FORWARD,
    PARTS,
    SAMPLE,
    SEND,
    TRANSPORT,
    ProfiledStepOutput,
    engine_targets,
    rank_targets,
)
from quire.worker.bench.stopwatch import Stopwatch, replaced
from quire.worker.config import EngineConfig
from quire.worker.engine import Engine
from quire.worker.errors import ConfigError
from quire.worker.executor import make_executor
from quire.worker.model_config import read_model_config
from quire.worker.model_facts import ModelFacts
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams
from quire.worker.step import Executor, StepInput, StepOutput

_WARM_UP_STEPS = 5
_DECODES_PER_CHUNK = 5
"""A chunk takes so much longer than a decode that fewer of them are measured."""


@dataclass(frozen=True, kw_only=True)
class StepProfileConfig:
    """Which steps to profile.

    Raises:
        ConfigError: A count is too small, or the model's context is.
    """

    engine: EngineConfig
    batches: tuple[int, ...] = (1, 32, 128)
    """Sequences that decode in a step."""
    context: int = 256
    """Prompt tokens of each of them."""
    chunk: int = 512
    """Tokens of the prefill step."""
    num_steps: int = 100
    """Decode steps measured of each batch; a fifth as many prefill steps."""

    def __post_init__(self) -> None:
        for name in ("context", "chunk", "num_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 1 or more")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batches={self.batches}: at least one, each 1 or more")
        longest = read_model_config(self.engine.model).max_position_embeddings
        if self.max_model_len > longest:
            raise ConfigError(
                f"context={self.context} + num_steps={self.num_steps}, or chunk={self.chunk}, is "
                f"{self.max_model_len} tokens with the warm-up, the model was trained for "
                f"{longest}: lower them"
            )

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence here."""
        return max(self.context + self.num_steps + _WARM_UP_STEPS, self.chunk) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """Microseconds of one part of a step."""

    median_us: float
    p99_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One kind of step."""

    kind: str
    """ "32 decodes" or "prefill 512"."""
    num_steps: int
    step: PartTime
    """The whole of it."""
    parts: dict[str, PartTime]
    """In the order in which a step goes through them; parts that never ran are left out."""
    around_model: PartTime
    """All but the forward pass and sampling."""


def bench_step(config: StepProfileConfig, *, output: Path) -> int:
    """Prints the profile as a table and writes it to ``output`` + ".json"."""
    profiles = profile_steps(config)
    print(f"{config.engine.model.resolve().name}, microseconds of a step: median and p99\n")
    print(step_table(profiles))
    file = output.with_name(f"{output.name}.json")
    settings = {**asdict(config), "engine": {**asdict(config.engine), "model": None}}
    settings["engine"]["model"] = str(config.engine.model)
    write_json(file, settings={"benchmark": "step", **settings}, rows=profiles)
    print(f"\nwrote {file}")
    return 0


def profile_steps(config: StepProfileConfig) -> list[StepProfile]:
    """Profiles every kind of step."""
    engine = _engine_config(config)
    stopwatch = Stopwatch()
    targets = engine_targets()
    if engine.tensor_parallel_size == 1:
        targets += rank_targets()
    with replaced(rank_process, "RANK_MODULE", "quire.worker.bench.profiled_rank"):
        executor, facts = make_executor(engine)
    try:
        with stopwatch.watching(*targets):
            profiler = _Profiler(config, engine, _Listening(executor), facts, stopwatch)
            decodes = [profiler.decodes(batch) for batch in config.batches]
            return [*decodes, profiler.prefill()]
    finally:
        executor.close()


def step_table(profiles: Sequence[StepProfile]) -> str:
    """A line for each part, two columns for each kind of step."""
    header = ["part"]
    for profile in profiles:
        header += [profile.kind, "p99"]
    present = [part for part in PARTS if any(part in profile.parts for profile in profiles)]
    lines = [[part, *_cells([p.parts.get(part) for p in profiles])] for part in present]
    lines.append(["the whole step", *_cells([p.step for p in profiles])])
    lines.append(["without model, sampling", *_cells([p.around_model for p in profiles])])
    return format_table(header, lines)


def step_profile(kind: str, times_ns: Sequence[dict[str, int]]) -> StepProfile:
    """Medians and 99th percentiles over the steps of one kind."""
    parts = [part for part in PARTS if any(part in times for times in times_ns)]
    model = (FORWARD, SAMPLE)
    return StepProfile(
        kind=kind,
        num_steps=len(times_ns),
        step=_part_time([sum(times.values()) for times in times_ns]),
        parts={part: _part_time([times.get(part, 0) for times in times_ns]) for part in parts},
        around_model=_part_time(
            [sum(ns for part, ns in times.items() if part not in model) for times in times_ns]
        ),
    )


class _Listening:
    """An executor that keeps what rank 0 said of its last step, if it speaks of it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_blocks = executor.num_blocks
        self.times_ns: dict[str, int] = {}

    def execute(self, step: StepInput) -> StepOutput:
        output = self._executor.execute(step)
        self.times_ns = output.times_ns if isinstance(output, ProfiledStepOutput) else {}
        return output

    def close(self) -> None:
        """Leaves the executor to whom it belongs."""


class _Profiler:
    """Runs steps of one kind after another on one executor."""

    def __init__(
        self,
        config: StepProfileConfig,
        engine: EngineConfig,
        executor: _Listening,
        facts: ModelFacts,
        stopwatch: Stopwatch,
    ) -> None:
        self._config = config
        self._engine_config = engine
        self._executor = executor
        self._facts = facts
        self._stopwatch = stopwatch
        self._rng = np.random.default_rng(0)

    def decodes(self, batch: int) -> StepProfile:
        engine = self._engine()
        num_decodes = self._config.num_steps + _WARM_UP_STEPS
        for _ in range(batch):
            # One more token comes with the prompt.
            self._add(engine, num_tokens=self._config.context, max_tokens=num_decodes + 1)
        while engine.stats().num_pending_prefill_tokens:
            engine.step()
        times_ns = [self._step(engine) for _ in range(num_decodes)][_WARM_UP_STEPS:]
        return step_profile(f"{batch} decode{'s' if batch > 1 else ''}", times_ns)

    def prefill(self) -> StepProfile:
        engine = self._engine()
        times_ns = []
        for _ in range(_WARM_UP_STEPS + -(-self._config.num_steps // _DECODES_PER_CHUNK)):
            self._add(engine, num_tokens=self._config.chunk, max_tokens=1)
            times_ns.append(self._step(engine))
        return step_profile(f"prefill {self._config.chunk}", times_ns[_WARM_UP_STEPS:])

    def _engine(self) -> Engine:
        return Engine(self._engine_config, self._facts, self._executor)

    def _add(self, engine: Engine, *, num_tokens: int, max_tokens: int) -> None:
        tokens = self._rng.integers(self._facts.vocab_size, size=num_tokens, dtype=np.uint32)
        request = Request(
            request_id=str(self._rng.integers(2**62)),
            prompt_token_ids=tokens,
            params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
        engine.add_request(request)

    def _step(self, engine: Engine) -> dict[str, int]:
        """Nanoseconds of one step by part."""
        self._stopwatch.take()
        engine.step()
        times_ns = self._stopwatch.take()
        rank_ns = self._executor.times_ns
        if rank_ns:
            # The wait was for this, so it is no transport. Rank 0 may have begun already while
            # the others were sent the step.
            in_wait_ns = min(sum(rank_ns.values()), times_ns[TRANSPORT])
            times_ns[TRANSPORT] -= in_wait_ns
            times_ns[SEND] -= sum(rank_ns.values()) - in_wait_ns
        return {part: times_ns.get(part, 0) + rank_ns.get(part, 0) for part in times_ns | rank_ns}


def _engine_config(config: StepProfileConfig) -> EngineConfig:
    """Room for the largest batch, and a step for the chunk."""
    engine, most = config.engine, max(config.batches)
    blocks_each = -(-config.max_model_len // engine.block_size)
    return replace(
        engine,
        num_blocks=(blocks_each + 1) * most + 1,
        max_model_len=config.max_model_len,
        max_num_seqs=max(engine.max_num_seqs, most),
        max_num_batched_tokens=max(engine.max_num_batched_tokens, config.chunk, most),
    )


def _part_time(times_ns: Sequence[int]) -> PartTime:
    median_us, p99_us = (np.percentile(times_ns, [50, 99]) / 1e3).tolist()
    return PartTime(median_us=median_us, p99_us=p99_us)


def _cells(times: Sequence[PartTime | None]) -> list[str]:
    cells = []
    for time in times:
        cells += ["", ""] if time is None else [f"{time.median_us:.0f}", f"{time.p99_us:.0f}"]
    return cells
