"""The collectives of tensor parallelism: all-reduce and gathers over a group of ranks.

A single rank needs no process group and has no overhead.
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

from quire.kernels.native import library as native
from quire.kernels.native.shared import SharedGroup
from quire.worker.rank.symmetric import open_fixed_order
from quire.worker.request.arrays import Longs

log = logging.getLogger(__name__)

# S rows   V vocabulary   G rows that are greedy   R ranks


class TensorParallel:
    """One rank's communicator in a group of ``size`` ranks that run in lockstep."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums ``x`` over all ranks, in place."""
        return x

    def gather_columns(self, x_SV: Tensor, *, num_columns: int) -> Tensor | None:
        """Gathers ``[S, num_columns]`` on rank 0 from each rank's columns; ``None`` elsewhere."""
        if self.size == 1:
            return x_SV
        # A gather needs equal parts, while ranges differ by up to one column.
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
        """The first column with the greatest value of each row, on rank 0; ``None`` elsewhere. It
        is -1 if the greatest is infinite, as it is for a row of NaN.

        ``greatest_G2``: for each row, the greatest value in this rank's range of ``num_columns``,
        and its column.
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
    """Collectives between CPU ranks of one machine over shared memory. A round takes microseconds.
    Sums have the same bits for any number of ranks that divides the model's parts of a sum."""

    def __init__(self, library: ctypes.CDLL, fd: int, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = SharedGroup(library, fd, rank=rank, size=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def _gather(self, x: Tensor) -> list[Tensor] | None:
        return self._group.gather(x)


class DistributedTensorParallel(TensorParallel):
    """Collectives of torch.distributed: gloo on CPUs, NCCL on GPUs, where `FixedOrder` may replace
    NCCL's all-reduce.

    On CPUs each rank adds all ranks' parts in float32 as a binary tree, with the same bits as in
    shared memory. This sends ``size - 1`` tensors to each rank, where gloo's own all-reduce sends
    about two; but the order of gloo's sum depends on ``size``.
    """

    def __init__(
        self, *, rank: int, size: int, device: torch.device, store: Store, one_node: bool
    ) -> None:
        """Joins the process group through ``store``; blocks until all ranks have joined."""
        self.rank = rank
        self.size = size
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            # The engine's own deadline is much shorter; this only bounds a start that fails.
            timeout=datetime.timedelta(minutes=30),
            device_id=device if device.type == "cuda" else None,
        )

        # NCCL's order of a sum depends on a value's place in the tensor: with 4 ranks or more a
        # row's bits would depend on its batch. It is for GPUs that cannot map each other's memory.
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
    """Joins a group over the fastest transport between its ranks.

    On one node, ``shared_fd`` is a file of `quire.kernels.native.shared.shared_bytes` zeros, and
    ``store`` an empty file, because a port could be taken between its choice and its use. On
    several nodes, ``store`` is the address to which rank 0's ``listener`` is bound; this function
    takes ownership of the listener.
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
    """Sums as a binary tree, in the order of ``native/shared_sum.cpp``: ((0 + 1) + (2 + 3))."""
    if len(parts_R) == 1:
        return parts_R[0]
    middle = len(parts_R) // 2
    return _tree_sum(parts_R[:middle]) + _tree_sum(parts_R[middle:])
