"""Executors of tests, which compute a step at once or not at all."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace

from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments


class DirectExecutor(ABC):
    """An executor that runs a step when it is asked for its result. Subclasses say how."""

    num_ahead = 0
    numerics = ""

    def __init__(self) -> None:
        self._submitted: deque[StepInput] = deque()

    def submit(self, step: StepInput) -> None:
        self._submitted.append(step)

    def send_edits(self, adjustments: Adjustments | None) -> None:
        step = self._submitted.pop()
        sampling = replace(step.sampling, adjustments=adjustments)
        self._submitted.append(replace(step, sampling=sampling))

    def result(self) -> StepOutput:
        return self.execute(self._submitted.popleft())

    @abstractmethod
    def execute(self, step: StepInput) -> StepOutput:
        """Runs the model once."""

    def close(self) -> None:  # noqa: B027  # Most of them have nothing to free.
        """Frees what the executor holds."""
