"""Weights that are drawn where a checkpoint's would be read: norms are ones, biases too."""

import torch
from torch import Tensor

from quire.worker.model.loader import Weights
from quire.worker.model.spec import ModelSpec


class RandomWeights(Weights):
    def __init__(self, *, std: float, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._std = std
        self.stored = None
        self._unchecked = []

    def has(self, module: str) -> bool:
        """There is no file."""
        return False

    def refuse_unread(self, spec: ModelSpec, *, known: tuple[str, ...] = ()) -> None:
        pass

    def read_into(
        self,
        out: Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        del name, rows, columns
        if len(shape) == 1:
            out.fill_(1)
        else:
            out.normal_(std=self._std)
