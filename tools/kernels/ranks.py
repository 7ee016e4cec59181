"""Runs all ranks of a Triton all-reduce in one process, on one device, for tests and benchmarks."""

import torch
from torch import Tensor

from quire.kernels.triton.all_reduce import (
    MAX_BYTES,
    MAX_PROGRAMS,
    TWO_SHOT_BYTES,
    Peers,
    all_reduce,
    launch_two_shots,
)


class LocalRanks:
    """The memory of all ranks."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        shape = (size, 2, MAX_BYTES // dtype.itemsize)
        self.buffers = torch.full(shape, 99.0, device=device).to(dtype)
        self.flags = torch.zeros(size, MAX_PROGRAMS, size, dtype=torch.int32, device=device)
        self.epochs = torch.zeros(size, MAX_PROGRAMS, dtype=torch.int32, device=device)
        buffers_R, flags_R = (
            torch.tensor([one.data_ptr() for one in tensor], device=device)
            for tensor in (self.buffers, self.flags)
        )
        self.peers = [
            Peers(
                rank=rank,
                size=size,
                buffers_R=buffers_R,
                flags_R=flags_R,
                epochs_P=self.epochs[rank],
            )
            for rank in range(size)
        ]

    def reduce_alone(self, rank: int, inputs: list[Tensor]) -> Tensor:
        """The result of ``rank`` if all other ranks have reached the barrier before it."""
        epoch = int(self.epochs[rank, 0]) + 1
        for other, x in enumerate(inputs):
            if other != rank:
                self.buffers[other, epoch % 2, : x.numel()] = x.flatten()
        self.flags[rank] = epoch
        return all_reduce(inputs[rank].clone(), self.peers[rank])


class RanksAtOnce:
    """All ranks of a two-shot all-reduce in one launch, with ``num_programs`` programs per rank.
    All programs must run at the same time."""

    def __init__(
        self, size: int, dtype: torch.dtype, num_programs: int, device: torch.device | str = "cpu"
    ) -> None:
        shape = (size, 2, TWO_SHOT_BYTES // dtype.itemsize)
        self.buffers = torch.full(shape, 99.0, device=device).to(dtype)
        self.flags = torch.zeros(size, num_programs, size, dtype=torch.int32, device=device)
        self.epochs = torch.zeros(size, num_programs, dtype=torch.int32, device=device)
        buffers_R, flags_R = (
            torch.tensor([one.data_ptr() for one in tensor], device=device)
            for tensor in (self.buffers, self.flags)
        )
        self._peers = Peers(
            rank=0, size=size, buffers_R=buffers_R, flags_R=flags_R, epochs_P=self.epochs
        )

    def all_reduce(self, x_RN: Tensor) -> None:
        """Replaces each rank's tensor by the sum."""
        size, num_programs = self.epochs.shape
        launch_two_shots((num_programs, size), x_RN, self._peers)
