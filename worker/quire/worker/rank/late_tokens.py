"""Late tokens: sampled tokens that the next step needs before the host has received them.

On a GPU the next step is launched while one runs, so these tokens stay on the device.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.worker.request.arrays import Ints
from quire.worker.step.messages import StepOutput

# S rows that the earlier step samples   L tokens of the later one that are among them
# T tokens of the later step


class Pending(Protocol):
    """The output of a step that was launched on rank 0."""

    @property
    def token_ids_S(self) -> Tensor:
        """The sampled tokens: int64, on the device."""

    def wait(self) -> StepOutput:
        """Waits for the device and returns the step's output."""


@dataclass(frozen=True, slots=True)
class Done:
    """A `Pending` whose output is ready."""

    output: StepOutput

    @property
    def token_ids_S(self) -> Tensor:
        return torch.from_numpy(self.output.token_ids_S)

    def wait(self) -> StepOutput:
        return self.output


class NoTokens:
    """A `Pending` of a step that copies blocks and computes nothing."""

    def __init__(self, device: torch.device) -> None:
        self.token_ids_S = torch.empty(0, dtype=torch.int64, device=device)
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> StepOutput:
        """Waits for the copies and returns the empty output."""
        if self._event is not None:
            self._event.synchronize()
        return StepOutput(np.empty(0, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class LateTokens:
    """The tokens that a step needs from the previous one."""

    sampled_S: Tensor
    """Sampled tokens of the previous step: int64, on the device."""
    tokens_L: Ints
    """Index of each late token in T."""
    rows_L: Ints
    """Index of each late token in S."""

    def put(self, token_ids_T: Tensor, tokens_L: Tensor, rows_L: Tensor) -> Tensor:
        """Writes the tokens into ``token_ids_T`` and returns it. ``tokens_L`` and ``rows_L`` are
        this object's, copied to the device. Does not wait for the device."""
        return token_ids_T.index_copy_(
            0, tokens_L.long(), self.sampled_S.index_select(0, rows_L.long())
        )
