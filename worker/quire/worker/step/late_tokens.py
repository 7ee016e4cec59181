"""Sampled tokens that the host has not waited for, and the step that needs them.

On a GPU the next step is launched while one runs: the tokens between them stay on the device.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.worker.api.arrays import Ints
from quire.worker.step.messages import StepOutput

# S rows that the earlier step samples   L tokens of the later one that are among them
# T tokens of the later step


class Pending(Protocol):
    """A step that was launched on rank 0."""

    @property
    def token_ids_S(self) -> Tensor:
        """int64, on the device."""

    def wait(self) -> StepOutput:
        """The step's output, once the device has come so far."""


@dataclass(frozen=True, slots=True)
class Done:
    """A `Pending` whose output is there."""

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
        """The empty output, once the copies are made."""
        if self._event is not None:
            self._event.synchronize()
        return StepOutput(np.empty(0, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class LateTokens:
    """The tokens that a step needs from the one before it."""

    sampled_S: Tensor
    """int64, on the device."""
    tokens_L: Ints
    """The place of each of them in T."""
    rows_L: Ints
    """Which of S it is."""

    def put(self, token_ids_T: Tensor, tokens_L: Tensor, rows_L: Tensor) -> Tensor:
        """Writes them into ``token_ids_T`` and returns it. ``tokens_L`` and ``rows_L`` are this
        object's, on the device, which is not waited for."""
        return token_ids_T.index_copy_(
            0, tokens_L.long(), self.sampled_S.index_select(0, rows_L.long())
        )
