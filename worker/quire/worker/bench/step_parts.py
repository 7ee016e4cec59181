"""The parts of a step that are timed: which functions they are, in the engine and in a rank."""

import pickle
from dataclasses import dataclass, field

from quire.worker import engine, executor
from quire.worker.bench.stopwatch import Target
from quire.worker.scheduler import Scheduler
from quire.worker.step import StepOutput

SCHEDULE = "schedule"
PREPARE = "input preparation"
PICKLE = "pickle"
SEND = "send"
TRANSPORT = "transport, wake-ups"
TO_DEVICE = "input to device"
FORWARD = "model forward"
SAMPLE = "sampling"
RECEIVE = "receive"
TOKENS = "token bookkeeping"
REST = "rest"

PARTS = (
    *(SCHEDULE, PREPARE, PICKLE, SEND, TRANSPORT, TO_DEVICE, FORWARD, SAMPLE),
    *(RECEIVE, TOKENS, REST),
)
"""In the order in which a step goes through them."""


@dataclass(frozen=True, slots=True)
class ProfiledStepOutput(StepOutput):
    """A step's output, and what rank 0 spent on it."""

    times_ns: dict[str, int] = field(default_factory=dict)


def engine_targets() -> list[Target]:
    """What the engine's own process does. Waiting for a rank counts as transport at first."""
    ranks = executor.ProcessExecutor
    return [
        Target(engine.Engine, "step", REST),
        Target(Scheduler, "schedule", SCHEDULE),
        Target(engine, "build_step_input", PREPARE),
        Target(pickle, "dumps", PICKLE),
        Target(ranks, "_send", SEND),
        Target(ranks, "_wait", TRANSPORT),
        Target(ranks, "_receive", RECEIVE),
        Target(Scheduler, "finish_step", TOKENS),
        Target(engine.Engine, "_take_tokens", TOKENS),
    ]


def rank_targets() -> list[Target]:
    """What a rank does, be it in the engine's process or in one of its own."""
    import torch

    from quire.worker import model_runner

    runner = model_runner.ModelRunner
    # A GPU goes on after the call returns; whoever waits for it first would be charged for it.
    finish = torch.cuda.synchronize if torch.cuda.is_available() else None
    return [
        Target(runner, "execute", REST),
        Target(runner, "_to_device", TO_DEVICE),
        Target(runner, "forward", FORWARD, finish),
        Target(runner, "_forward_and_choose", FORWARD, finish),
        Target(model_runner, "sample", SAMPLE),
        Target(model_runner, "sample_beside", SAMPLE),
    ]
