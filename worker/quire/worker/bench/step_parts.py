"""The parts of a step that are timed: which functions they are, in the engine and in a rank.

Engine and rank 0 are two tracks. Each one's parts, what it waits for among them, add up to the
whole step, be it prepared before or while the one before it runs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.worker import engine, executor, process_executor
from quire.worker.bench.stopwatch import Stopwatch, Target
from quire.worker.model_runner import ModelRunner
from quire.worker.scheduler import Scheduler
from quire.worker.step import StepInput, StepOutput
from quire.worker.step_input import StepInputs

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

Execute = Callable[[ModelRunner, StepInput], StepOutput | None]


@dataclass(frozen=True, slots=True)
class ProfiledStepOutput(StepOutput):
    """A step's output, and what rank 0 spent on it."""

    times_ns: dict[str, int] = field(default_factory=dict)


def engine_targets() -> list[Target]:
    """What the engine's own process does."""
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
    """What a rank does, be it in the engine's process or in one of its own."""
    import torch

    from quire.worker import model_runner

    # A GPU goes on after the call returns; whoever waits for it first would be charged for it.
    finish = torch.cuda.synchronize if torch.cuda.is_available() else None
    return [
        Target(ModelRunner, "execute", RANK_REST),
        Target(ModelRunner, "_to_device", TO_DEVICE),
        Target(ModelRunner, "forward", FORWARD, finish),
        Target(ModelRunner, "_forward_and_choose", FORWARD, finish),
        Target(model_runner, "sample", SAMPLE),
        Target(model_runner, "sample_beside", SAMPLE),
    ]


def profiled(execute: Execute, stopwatch: Stopwatch) -> Execute:
    """``execute``, whose parts ``stopwatch`` times, with the times in its output."""
    ended_ns = time.perf_counter_ns()

    def profiled_execute(runner: ModelRunner, step: StepInput) -> StepOutput | None:
        nonlocal ended_ns
        idle_ns = time.perf_counter_ns() - ended_ns
        output = execute(runner, step)
        times_ns = {IDLE: idle_ns, **stopwatch.take()}
        ended_ns = time.perf_counter_ns()
        if output is None:
            return None
        return ProfiledStepOutput(output.token_ids_S, output.logprobs, times_ns)

    return profiled_execute


def write_profiled(output: StepOutput, slot: Any) -> object:
    """`quire.worker.step_codec.write_output`, with the times in the message."""
    from quire.worker.step_codec import write_output

    assert isinstance(output, ProfiledStepOutput)
    return write_output(output, slot), output.times_ns


def read_profiled(slot: Any, message: Any) -> StepOutput:
    """The other end."""
    from quire.worker.step_codec import read_output

    logprobs, times_ns = message
    output = read_output(slot, logprobs)
    return ProfiledStepOutput(output.token_ids_S, output.logprobs, times_ns)
