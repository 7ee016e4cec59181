"""The collectives of a group of ranks: what tensor parallelism adds to a forward pass.

One rank alone needs no process group, and pays nothing.
"""

import ctypes
import datetime
import logging
import socket
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from quire.kernels import native
from quire.kernels.native_shared import SharedGroup
from quire.worker.api.arrays import Longs
from quire.worker.model.symmetric import open_fixed_order

log = logging.getLogger(__name__)

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
        """The first of the greatest columns of each row on rank 0, ``None`` elsewhere; -1 where
        the greatest is infinite, as it is where all of a row are NaN.

        ``greatest_G2`` has the value and the column of this rank's greatest in its range of
        ``num_columns``.
        """
        parts = self._gather(greatest_G2)
        if parts is None:
            return None
        best_G2 = parts[0].numpy()
        for rank, part in enumerate(parts[1:], 1):
            part_G2 = part.numpy() + np.array([0, num_columns * rank // self.size])
            best_G2 = np.where(part_G2[:, :1] > best_G2[:, :1], part_G2, best_G2)
        columns_G: Longs = np.where(np.isfinite(best_G2[:, 0]), best_G2[:, 1], -1).astype(np.int64)
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

        # NCCL's order depends on a value's place in the tensor: with 4 ranks or more a row's bits
        # would depend on its batch. It is for GPUs that cannot reach each other.
        self._fixed_order = (
            open_fixed_order(rank=rank, size=size, device=device)
            if device.type == "cuda" and one_node
            else None
        )
        if device.type == "cuda" and self._fixed_order is None and size > 2 and rank == 0:
            log.warning(
                "tensor_parallel_size=%d over NCCL, as the GPUs cannot reach each other's memory: "
                "the bits of a request's logits may depend on its batch",
                size,
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._fixed_order is not None and self._fixed_order.takes(x):
            return self._fixed_order.all_reduce(x)
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
    *,
    rank: int,
    size: int,
    device: torch.device,
    store: Path | tuple[str, int],
    listener: socket.socket | None,
    shared_fd: int | None,
) -> TensorParallel:
    """This rank's end of a group, over the fastest way there is between its ranks.

    On one node, ``shared_fd`` is a file of `quire.kernels.native_shared.shared_bytes` zeros, and
    ``store`` an empty file: nothing can take it between the choice and the use, as a port could be.
    On several, ``store`` is an address, to which rank 0's ``listener`` is bound; it is taken over.
    """
    library = native.library() if device.type == "cpu" else None
    if library is not None and shared_fd is not None:
        return SharedMemoryTensorParallel(library, shared_fd, rank=rank, size=size)
    meeting: Store
    if isinstance(store, Path):
        meeting = FileStore(str(store), size)
    else:
        meeting = TCPStore(
            *store,
            world_size=size,
            is_master=listener is not None,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
    return DistributedTensorParallel(
        rank=rank, size=size, device=device, store=meeting, one_node=shared_fd is not None
    )


def _tree_sum(parts_R: Tensor) -> Tensor:
    """Four ranks add as two ranks of two would: see ``native/shared_sum.cpp``."""
    if len(parts_R) == 1:
        return parts_R[0]
    middle = len(parts_R) // 2
    return _tree_sum(parts_R[:middle]) + _tree_sum(parts_R[middle:])
