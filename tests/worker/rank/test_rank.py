"""A rank sends results in order, and while later steps are launched."""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.worker.rank.codec import StepSlots, unpack
from quire.worker.rank.messages import Failed
from quire.worker.rank.rank import Answers
from quire.worker.step.messages import StepOutput


@dataclass
class Slow:
    """A step that runs on a device until the test sets ``done``."""

    token: int
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    @property
    def token_ids_S(self) -> torch.Tensor:
        return torch.tensor([self.token])

    def wait(self) -> StepOutput:
        assert self.done.wait(60)
        if self.error is not None:
            raise self.error
        return StepOutput(np.array([self.token], dtype=np.int64))


class Line:
    """One end of a connection, which records sent messages."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.changed = threading.Semaphore(0)

    def send_bytes(self, message: bytes) -> None:
        self.sent.append(message)
        self.changed.release()

    send: Any = send_bytes


def test_a_step_is_taken_while_the_device_runs_the_one_before_and_answers_come_in_order() -> None:
    line: Any = Line()
    answers = Answers(line, StepSlots(64), in_thread=True)
    first, second = Slow(7), Slow(8)
    answers.add(0, first)
    answers.add(1, second)  # Returns, though the first step has no tokens yet.
    second.done.set()
    assert line.sent == []
    first.done.set()
    assert line.changed.acquire(timeout=60)
    assert line.changed.acquire(timeout=60)
    outputs = [StepSlots(64).read_output(n, unpack(sent)) for n, sent in enumerate(line.sent)]
    assert [output.token_ids_S.tolist() for output in outputs] == [[7], [8]]


def test_a_fault_of_the_device_is_told_and_ends_the_rank() -> None:
    line: Any = Line()
    ended: list[int] = []
    over = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        over.set()

    answers = Answers(line, StepSlots(64), in_thread=True, end=end)
    broken = Slow(1, error=RuntimeError("an illegal memory access"))
    broken.done.set()
    answers.add(0, broken)
    assert over.wait(60)
    assert ended == [1]
    (message,) = line.sent
    assert isinstance(message, Failed)
    assert "an illegal memory access" in message.message
