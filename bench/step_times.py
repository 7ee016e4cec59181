"""Times the steps of one engine: ``python -m bench.step_times [MODEL]``.

Batches of sequences that each decode one token, and one chunk of a prompt; each with the next step
prepared while one runs, and without. It prints medians and 99th percentiles and writes them as
JSON, which ``quire simulate --fit`` reads. What a step's time goes into is for a profiler to say:
docs/benchmarks.md.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from quire.cluster.cli.engine import add_engine_flags, engine_config
from quire.worker.bench.report import check_writable, format_table, write_json
from quire.worker.blocks.hashing import TokenIds
from quire.worker.group_engine import GroupEngine
from quire.worker.model.hub import fetch_checkpoint, model_name
from quire.worker.rank.executor import make_executor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams

_WARM_UP_STEPS = 5
_DECODES_PER_CHUNK = 5
"""A chunk takes so much longer than a decode that fewer of them are measured."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Which steps to time.

    Raises:
        ConfigError: A count is too small.
    """

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
        if min(self.context, self.chunk, self.num_steps, *self.batches) < 1:
            raise ConfigError(f"{self}: batches, context, chunk and num_steps must be 1 or more")
        if not 0 <= self.shared_context < self.context:
            raise ConfigError(
                f"shared_context={self.shared_context}: must be less than context={self.context}"
            )

    def engine(self, config: EngineConfig) -> EngineConfig:
        """``config`` with room for the largest batch, and a step for the chunk.

        Raises:
            ConfigError: Shared blocks are not full.
        """
        if self.shared_context % config.block_size:
            raise ConfigError(
                f"shared_context={self.shared_context}: must be full blocks, a multiple of "
                f"block_size={config.block_size}"
            )
        most = max(self.batches)
        # A step for each chunk of the batch's prompts, in which its first rows decode.
        budget = max(config.max_num_batched_tokens, self.chunk, 2 * most)
        num_outputs = most * self.context // (budget - most) + self.num_outputs
        longest = max(self.context + num_outputs, self.chunk + 1)
        return replace(
            config,
            num_blocks=(-(-longest // config.block_size) + 1) * most + 1,
            max_model_len=longest,
            max_num_seqs=max(config.max_num_seqs, most),
            max_num_batched_tokens=budget,
            speculation=False,  # A decode is one token.
        )

    @property
    def num_outputs(self) -> int:
        """Tokens of a sequence from its whole batch's first decode to the end."""
        return _WARM_UP_STEPS + self.num_steps + 4


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Microseconds."""

    median_us: float
    p99_us: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of step."""

    kind: str
    """ "32 decodes" or "prefill 512"."""
    is_async: bool
    """Whether each step was prepared while the one before it ran."""
    num_steps: int
    step: StepTime


def time_steps(steps: Steps, config: EngineConfig) -> list[Row]:
    """Times every kind of step."""
    config = steps.engine(config)
    executor, facts = make_executor(config)
    max_model_len = config.max_model_len or 0
    rng = np.random.default_rng(0)

    def tokens(number: int) -> TokenIds:
        return rng.integers(facts.vocab_size, size=number, dtype=np.uint32)

    def add(engine: GroupEngine, prompt: TokenIds, *, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(
            Prepared(
                request_id=str(rng.integers(2**62)), prompt_token_ids=prompt, sampling=sampling
            )
        )

    def decodes(batch: int) -> list[int]:
        engine = GroupEngine(config, facts, executor)
        shared = tokens(steps.shared_context)
        for _ in range(batch):
            prompt = np.concatenate((shared, tokens(steps.context - len(shared))))
            add(engine, prompt, max_tokens=max_model_len - steps.context)
        while engine.stats().num_pending_prefill_tokens:
            engine.step()
        times_ns = [_timed(engine) for _ in range(_WARM_UP_STEPS + steps.num_steps)]
        assert engine.stats().num_running == batch
        return _finished(engine, times_ns)

    def prefills() -> list[int]:
        engine = GroupEngine(config, facts, executor)
        times_ns = []
        for _ in range(_WARM_UP_STEPS + -(-steps.num_steps // _DECODES_PER_CHUNK)):
            add(engine, tokens(steps.chunk), max_tokens=1)
            times_ns.append(_timed(engine))
        return _finished(engine, times_ns)

    is_async = bool(executor.num_ahead)
    try:
        rows = [
            _row(f"{batch} decode{'s' if batch > 1 else ''}", is_async, decodes(batch))
            for batch in steps.batches
        ]
        return [*rows, _row(f"prefill {steps.chunk}", is_async, prefills())]
    finally:
        executor.close()


def _timed(engine: GroupEngine) -> int:
    begin_ns = time.perf_counter_ns()
    engine.step()
    return time.perf_counter_ns() - begin_ns


def _finished(engine: GroupEngine, times_ns: list[int]) -> list[int]:
    """Those that count. Ends the engine's steps: those submitted are not the next engine's."""
    while engine.has_work:
        engine.step()
    return times_ns[_WARM_UP_STEPS:]


def _row(kind: str, is_async: bool, times_ns: Sequence[int]) -> Row:
    median_us, p99_us = (np.percentile(times_ns, [50, 99]) / 1e3).tolist()
    step = StepTime(median_us=median_us, p99_us=p99_us)
    return Row(kind=kind, is_async=is_async, num_steps=len(times_ns), step=step)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step_times", description="Times the steps of one engine."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", type=Path, help="the demo model if absent")
    add("--batches", type=int, nargs="+", default=[1, 32, 128], help="batch sizes of decodes")
    add("--context", type=int, default=256, help="tokens before the first decode")
    add(
        "--shared-context",
        type=int,
        default=0,
        help="tokens of the context, full blocks, that are the same in all of a batch",
    )
    add("--chunk", type=int, default=512, help="prompt tokens of a prefill step")
    add("--steps", type=int, default=100, help="steps measured of each kind")
    add("--output", type=Path, default=Path("quire-step-times"), help="stem of the JSON file")
    add_engine_flags(parser)
    options = parser.parse_args(arguments)
    steps = Steps(
        batches=tuple(options.batches),
        context=options.context,
        shared_context=options.shared_context,
        chunk=options.chunk,
        num_steps=options.steps,
    )
    check_writable(options.output)
    config = engine_config(options, options.model)
    config = replace(config, model=fetch_checkpoint(config.model))
    wanted = config.async_scheduling
    rows: list[Row] = []
    for is_async in (False, True) if wanted is None else (wanted,):
        rows += time_steps(steps, replace(config, async_scheduling=is_async))
    print(f"{model_name(config.model)}, microseconds of a step")
    cells = [
        [row.kind, str(row.is_async), f"{row.step.median_us:.0f}", f"{row.step.p99_us:.0f}"]
        for row in rows
    ]
    print(format_table(["step", "prepared ahead", "median", "p99"], cells))
    file = options.output.with_name(f"{options.output.name}.json")
    engine = {**asdict(config), "model": str(config.model)}
    write_json(file, settings={"benchmark": "step", **asdict(steps), "engine": engine}, rows=rows)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
