"""The collectives of a group of ranks: what tensor parallelism adds to a forward pass.

One rank alone needs no process group, and pays nothing.
"""

import ctypes
import datetime
import socket
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from quire.kernels import native
from quire.kernels.native_shared import SharedGroup
from quire.worker.step import Longs
from quire.worker.symmetric import open_one_shot

# S rows   V vocabulary   G rows that are greedy   R ranks


class TensorParallel:
    """One rank's end of a group of ``size`` ranks that run in lockstep."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in ``x`` itself."""
        return x

    def gather_columns(self, x_SV: Tensor, *, num_columns: int) -> Tensor | None:
        """``[S, num_columns]`` on rank 0, of which each rank has a range; ``None`` elsewhere."""
        if self.size == 1:
            return x_SV
        # A gather wants equal parts; ranges differ by a column at most.
        widths = [
            num_columns * (rank + 1) // self.size - num_columns * rank // self.size
            for rank in range(self.size)
        ]
        padded = torch.nn.functional.pad(x_SV, (0, max(widths) - x_SV.shape[1])).contiguous()
        parts = self._gather(padded)
        if parts is None:
            return None
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def gather_greatest(self, greatest_G2: Tensor, *, num_columns: int) -> Longs | None:
        """The first of the greatest columns of each row on rank 0, ``None`` elsewhere.

        ``greatest_G2`` has the value and the column of this rank's greatest in its range of
        ``num_columns``.
        """
        parts = self._gather(greatest_G2)
        if parts is None:
            return None
        parts_RG2 = torch.stack(parts).numpy()
        starts_R1 = np.arange(self.size)[:, None] * num_columns // self.size
        columns_RG = parts_RG2[:, :, 1].astype(np.int64) + starts_R1
        best_G = parts_RG2[:, :, 0].argmax(axis=0)
        columns_G: Longs = columns_RG[best_G, np.arange(len(best_G))]
        return columns_G

    def _gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's ``x`` on rank 0, ``None`` elsewhere."""
        return [x]


class SharedMemoryTensorParallel(TensorParallel):
    """CPU ranks of one machine, through memory that they share: a round takes microseconds, and
    sums have the same bits at any number of ranks that divides the model's parts of a sum."""

    def __init__(self, library: ctypes.CDLL, fd: int, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = SharedGroup(library, fd, rank=rank, size=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def _gather(self, x: Tensor) -> list[Tensor] | None:
        return self._group.gather(x)


class DistributedTensorParallel(TensorParallel):
    """Collectives of torch.distributed: gloo on CPUs, NCCL on GPUs, and one of our own there.

    On CPUs sums are made of everybody's parts in float32 as a binary tree, like those in shared
    memory and with the same bits. That moves ``size - 1`` tensors to each rank where gloo's own
    sum moves about two; but its order depends on ``size``.
    """

    def __init__(
        self, *, rank: int, size: int, device: torch.device, store: Store, one_node: bool
    ) -> None:
        """Meets the other ranks through ``store``."""
        self.rank = rank
        self.size = size
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            # The engine's own deadline comes long before; this only bounds a lost start.
            timeout=datetime.timedelta(minutes=30),
            device_id=device if device.type == "cuda" else None,
        )

        # Small tensors, those of decodes, need not wait for NCCL where the GPUs reach each other.
        self._one_shot = (
            open_one_shot(rank=rank, size=size, device=device)
            if device.type == "cuda" and one_node
            else None
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._one_shot is not None and self._one_shot.takes(x):
            return self._one_shot.all_reduce(x)
        if x.is_cuda:
            dist.all_reduce(x)
            return x
        values = x.float().flatten()
        parts = values.new_empty(self.size * len(values))
        dist.all_gather_single(parts, values)
        return x.copy_(_tree_sum(parts.view(self.size, *x.shape)))

    def _gather(self, x: Tensor) -> list[Tensor] | None:
        if self.rank != 0:
            dist.gather(x, dst=0)
            return None
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts, dst=0)
        return parts


def join(
    *, rank: int, size: int, device: torch.device, rendezvous: Path, shared_fd: int
) -> TensorParallel:
    """This rank's end of a group on one node, over the fastest way there is between its ranks.

    ``rendezvous`` is an empty file: nothing can take it between the choice and the use, as a port
    could be. ``shared_fd`` is a file of
    `quire.kernels.native_shared.shared_bytes` zeros.
    """
    library = native.library() if device.type == "cpu" else None
    if library is not None:
        return SharedMemoryTensorParallel(library, shared_fd, rank=rank, size=size)
    store = FileStore(str(rendezvous), size)
    return DistributedTensorParallel(
        rank=rank, size=size, device=device, store=store, one_node=True
    )


def join_over_network(
    *,
    rank: int,
    size: int,
    device: torch.device,
    store: tuple[str, int],
    listener: socket.socket | None,
) -> TensorParallel:
    """This rank's end of a group on several nodes, which meet at the address ``store``.
    ``listener`` is rank 0's and bound to that; it is taken over."""
    meeting = TCPStore(
        *store,
        world_size=size,
        is_master=listener is not None,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    return DistributedTensorParallel(
        rank=rank, size=size, device=device, store=meeting, one_node=False
    )


def _tree_sum(parts_R: Tensor) -> Tensor:
    """Four ranks add as two ranks of two would: see ``native/shared_sum.cpp``."""
    if len(parts_R) == 1:
        return parts_R[0]
    middle = len(parts_R) // 2
    return _tree_sum(parts_R[:middle]) + _tree_sum(parts_R[middle:])
