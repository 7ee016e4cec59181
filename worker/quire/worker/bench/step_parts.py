"""The parts of a step that are timed: which functions they are, in the engine and in a rank.

Engine and rank 0 are two tracks. Each one's parts, what it waits for among them, add up to the
whole step, be it prepared before or while the one before it runs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.worker import engine
from quire.worker.bench.stopwatch import Stopwatch, Target
from quire.worker.ranks import executor, process_executor
from quire.worker.runner.model_runner import ModelRunner
from quire.worker.schedule.scheduler import Scheduler
from quire.worker.schedule.step_input import StepInputs
from quire.worker.step.messages import StepInput, StepOutput

if TYPE_CHECKING:
    from torch import Tensor

    from quire.worker.step.late_tokens import Pending

SCHEDULE = "schedule"
PREPARE = "input preparation"
WRITE = "write step"
SEND = "wake ranks"
WAIT = "wait for rank 0"
RECEIVE = "read output"
TOKENS = "take tokens"
REST = "rest"

IDLE = "rank 0: no step"
TO_DEVICE = "rank 0: input to device"
FORWARD = "rank 0: model forward"
SAMPLE = "rank 0: sampling"
RANK_REST = "rank 0: rest"

ENGINE_PARTS = (SCHEDULE, PREPARE, WRITE, SEND, WAIT, RECEIVE, TOKENS, REST)
RANK_PARTS = (IDLE, TO_DEVICE, FORWARD, SAMPLE, RANK_REST)
"""Both in the order in which a step goes through them."""

Launch = Callable[..., "Pending | None"]


@dataclass(frozen=True, slots=True)
class ProfiledStepOutput(StepOutput):
    """A step's output, and what rank 0 spent on it."""

    times_ns: dict[str, int] = field(default_factory=dict)


def engine_targets() -> list[Target]:
    """Timed parts of the engine's own process."""
    ranks = process_executor.ProcessExecutor
    return [
        Target(engine.Engine, "step", REST),
        Target(Scheduler, "schedule", SCHEDULE),
        Target(StepInputs, "build", PREPARE),
        Target(process_executor, "write_step", WRITE),
        Target(ranks, "_send", SEND),
        Target(ranks, "_wait", WAIT),
        Target(executor.InProcessExecutor, "result", WAIT),
        Target(ranks, "_receive", RECEIVE),
        Target(process_executor, "read_output", RECEIVE),
        Target(Scheduler, "submitted", TOKENS),
        Target(engine.Engine, "_take_tokens", TOKENS),
    ]


def rank_targets() -> list[Target]:
    """Timed parts of a rank, in the engine's process or in its own."""
    import torch

    from quire.worker.runner import model_runner

    # A GPU goes on after the call returns; the first part that waits for it would be charged.
    finish = torch.cuda.synchronize if torch.cuda.is_available() else None
    return [
        Target(ModelRunner, "launch", RANK_REST),
        Target(ModelRunner, "_to_device", TO_DEVICE),
        Target(ModelRunner, "forward", FORWARD, finish),
        Target(ModelRunner, "_forward_and_choose", FORWARD, finish),
        Target(model_runner, "sample", SAMPLE),
        Target(model_runner, "sample_beside", SAMPLE),
    ]


@dataclass(frozen=True, slots=True)
class ProfiledPending:
    """A step that was launched, and what rank 0 spent on it."""

    pending: "Pending"
    times_ns: dict[str, int]

    @property
    def token_ids_S(self) -> "Tensor":
        return self.pending.token_ids_S

    def wait(self) -> StepOutput:
        return _with_times(self.pending.wait(), self.times_ns)


def profiled(launch: Launch, stopwatch: Stopwatch) -> Launch:
    """``launch``, whose parts ``stopwatch`` times, with the times in the step's output."""
    ended_ns = time.perf_counter_ns()

    def profiled_launch(runner: ModelRunner, step: StepInput, **options: Any) -> "Pending | None":
        nonlocal ended_ns
        idle_ns = time.perf_counter_ns() - ended_ns
        pending = launch(runner, step, **options)
        times_ns = {IDLE: idle_ns, **stopwatch.take()}
        ended_ns = time.perf_counter_ns()
        return None if pending is None else ProfiledPending(pending, times_ns)

    return profiled_launch


def _with_times(output: StepOutput, times_ns: dict[str, int]) -> ProfiledStepOutput:
    return ProfiledStepOutput(
        output.token_ids_S, output.logprobs, output.broken_rows, times_ns=times_ns
    )


def write_profiled(output: StepOutput, slot: Any) -> object:
    """`quire.worker.step.codec.write_output`, with the times in the message."""
    from quire.worker.step.codec import write_output

    assert isinstance(output, ProfiledStepOutput)
    return write_output(output, slot), output.times_ns


def read_profiled(slot: Any, message: Any) -> StepOutput:
    """The other end."""
    from quire.worker.step.codec import read_output

    logprobs, times_ns = message
    return _with_times(read_output(slot, logprobs), times_ns)
