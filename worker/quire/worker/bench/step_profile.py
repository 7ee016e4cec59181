"""Where the time of a step goes, part by part: ``quire bench step``.

Steps of three kinds and sizes: a batch of sequences that each decode one token, and one chunk of
a prompt; each with the next step prepared while one runs, and without. The engine's parts add up
to the step's time, and so do rank 0's. Where the ranks are processes, the way of a step to ranks
that have no model, and back, is timed too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import ConfigError
from quire.worker.api.hashing import TokenIds
from quire.worker.api.request import Prepared
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.bench.message_cost import time_messages
from quire.worker.bench.report import check_writable, write_json
from quire.worker.bench.step_parts import (
    WAIT,
    ProfiledStepOutput,
    engine_targets,
    profiled,
    rank_targets,
    read_profiled,
)
from quire.worker.bench.step_times import StepProfile, step_profile, step_table
from quire.worker.bench.stopwatch import Stopwatch, replaced
from quire.worker.engine import Engine
from quire.worker.model.config import read_model_spec
from quire.worker.model.facts import ModelFacts
from quire.worker.model.hub import model_name
from quire.worker.ranks import process as rank_process
from quire.worker.ranks import process_executor
from quire.worker.ranks.executor import make_executor
from quire.worker.runner.model_runner import ModelRunner
from quire.worker.step.messages import Executor, StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments

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
    shared_context: int = 0
    """Number of leading prompt tokens that are the same in all, and so in the same blocks."""
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
        size, shared = self.engine.block_size, self.shared_context
        if shared % size or not 0 <= shared < self.context:
            raise ConfigError(
                f"shared_context={shared}: must be full blocks, a multiple of block_size={size}, "
                f"and less than context={self.context}"
            )
        longest = read_model_spec(
            self.engine.model, model_impl=self.engine.model_impl
        ).max_positions
        if self.max_model_len > longest:
            raise ConfigError(
                f"context={self.context} + num_steps={self.num_steps}, or chunk={self.chunk}, is "
                f"{self.max_model_len} tokens with prefill and warm-up, the model was trained for "
                f"{longest}: lower them"
            )

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence here."""
        return max(self.context + self.num_outputs(max(self.batches)), self.chunk + 1)

    def num_outputs(self, batch: int) -> int:
        """Tokens that the first of ``batch`` sequences must be allowed, so that none of them has
        ended when the last step was measured."""
        budget = max(self.engine.max_num_batched_tokens, self.chunk) - batch
        prefill_steps = -(-batch * self.context // max(1, budget))
        return prefill_steps + _WARM_UP_STEPS + self.num_steps + 3


def bench_step(config: StepProfileConfig, *, output: Path) -> int:
    """Prints the profile as tables and writes it to ``output`` + ".json"."""
    check_writable(output)
    wanted = config.engine.async_scheduling
    modes = (False, True) if wanted is None else (wanted,)
    profiles = []
    for is_async in modes:
        profiles += profile_steps(config, is_async=is_async)
        prepared = "while the one before it runs" if is_async else "when the one before it has run"
        print(f"\n{model_name(config.engine.model)}, each step prepared {prepared}: ", end="")
        print("microseconds, median and p99\n")
        print(step_table([profile for profile in profiles if profile.is_async == is_async]))
    rows: list[object] = [*profiles]
    if config.engine.tensor_parallel_size > 1:
        messages = _messages(config)
        rows.append(messages)
        print(f"\n{messages.kind}: {messages.step.median_us:.0f} and {messages.step.p99_us:.0f}")
    file = output.with_name(f"{output.name}.json")
    settings = {**asdict(config), "engine": {**asdict(config.engine), "model": None}}
    settings["engine"]["model"] = str(config.engine.model)
    write_json(file, settings={"benchmark": "step", **settings}, rows=rows)
    print(f"\nwrote {file}")
    return 0


def profile_steps(config: StepProfileConfig, *, is_async: bool) -> list[StepProfile]:
    """Profiles every kind of step."""
    engine = replace(_engine_config(config), async_scheduling=is_async)
    stopwatch = Stopwatch()
    with _profiled_ranks(engine), stopwatch.watching(*engine_targets()):
        executor, facts = make_executor(engine)
        try:
            profiler = _Profiler(config, engine, _Listening(executor), facts, stopwatch)
            decodes = [profiler.decodes(batch) for batch in config.batches]
            return [*decodes, profiler.prefill()]
        finally:
            executor.close()


def _messages(config: StepProfileConfig) -> StepProfile:
    rows = max(config.batches)
    times_ns = time_messages(
        _engine_config(config), num_rows=rows, context=config.context, num_steps=config.num_steps
    )
    ranks = config.engine.tensor_parallel_size
    kind = f"a step of {rows} decodes to {ranks} ranks without a model, and back"
    return step_profile(kind, [{WAIT: ns} for ns in times_ns])


@contextmanager
def _profiled_ranks(config: EngineConfig) -> Iterator[None]:
    """Rank 0 says with each output what it spent on it."""
    if config.tensor_parallel_size > 1:
        with (
            replaced(rank_process, "RANK_MODULE", "quire.worker.bench.profiled_rank"),
            replaced(process_executor, "read_output", read_profiled),
        ):
            yield
        return
    stopwatch = Stopwatch()  # of its own: the rank may be in a thread of its own
    with stopwatch.watching(*rank_targets()):
        launch = profiled(ModelRunner.launch, stopwatch)
        with replaced(ModelRunner, "launch", launch):
            yield


class _Listening:
    """An executor that keeps what rank 0 said of its last step."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_blocks = executor.num_blocks
        self.num_ahead = executor.num_ahead
        self.numerics = executor.numerics
        self.times_ns: dict[str, int] = {}

    def submit(self, step: StepInput) -> None:
        self._executor.submit(step)

    def send_edits(self, adjustments: Adjustments | None) -> None:
        self._executor.send_edits(adjustments)

    def result(self) -> StepOutput:
        output = self._executor.result()
        assert isinstance(output, ProfiledStepOutput)
        self.times_ns = output.times_ns
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
        max_tokens = self._config.num_outputs(batch)
        shared = self._tokens(self._config.shared_context)
        for _ in range(batch):
            own = self._tokens(self._config.context - len(shared))
            self._add(engine, np.concatenate((shared, own)), max_tokens=max_tokens)
        while engine.stats().num_pending_prefill_tokens:
            engine.step()
        times_ns = [self._step(engine) for _ in range(_WARM_UP_STEPS + self._config.num_steps)]
        return self._profile(engine, f"{batch} decode{'s' if batch > 1 else ''}", times_ns)

    def prefill(self) -> StepProfile:
        engine = self._engine()
        times_ns = []
        for _ in range(_WARM_UP_STEPS + -(-self._config.num_steps // _DECODES_PER_CHUNK)):
            self._add(engine, self._tokens(self._config.chunk), max_tokens=1)
            times_ns.append(self._step(engine))
        return self._profile(engine, f"prefill {self._config.chunk}", times_ns)

    def _profile(
        self, engine: Engine, kind: str, times_ns: Sequence[dict[str, int]]
    ) -> StepProfile:
        # Its submitted steps must not be left to the next run.
        while engine.has_work:
            engine.step()
        is_async = self._executor.num_ahead > 0
        return step_profile(kind, times_ns[_WARM_UP_STEPS:], is_async=is_async)

    def _engine(self) -> Engine:
        return Engine(self._engine_config, self._facts, self._executor)

    def _tokens(self, number: int) -> TokenIds:
        return self._rng.integers(self._facts.vocab_size, size=number, dtype=np.uint32)

    def _add(self, engine: Engine, tokens: TokenIds, *, max_tokens: int) -> None:
        request = Prepared(
            request_id=str(self._rng.integers(2**62)),
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
        engine.add_request(request)

    def _step(self, engine: Engine) -> dict[str, int]:
        """Nanoseconds of one step by part."""
        self._stopwatch.take()
        engine.step()
        return self._stopwatch.take() | self._executor.times_ns


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
