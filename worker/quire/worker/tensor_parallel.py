"""The collectives of a group of ranks: what tensor parallelism adds to a forward pass.

One rank alone needs no process group, and pays nothing.
"""

import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# S rows   V vocabulary


class TensorParallel:
    """One rank's end of a group of ``size`` ranks that run in lockstep."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in ``x`` itself."""
        return x

    def gather_columns(self, x_SV: Tensor, *, num_columns: int) -> Tensor | None:
        """``[S, num_columns]`` on rank 0, of which each rank has a range; ``None`` elsewhere."""
        return x_SV


class DistributedTensorParallel(TensorParallel):
    """Collectives of torch.distributed: gloo on CPUs, NCCL on GPUs.

    gloo adds partial sums in an order of its own that depends on ``size``, so results of
    different sizes differ in their last bits; those of one size do not depend on the batch.
    """

    def __init__(self, *, rank: int, size: int, device: torch.device, rendezvous: Path) -> None:
        """Meets the other ranks through the file ``rendezvous``, which must be new.

        A file instead of a port: nothing can take it between the choice and the use.
        """
        self.rank = rank
        self.size = size
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=size,
            # The engine's own deadline comes long before; this only bounds a lost start.
            timeout=datetime.timedelta(minutes=30),
            device_id=device if device.type == "cuda" else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather_columns(self, x_SV: Tensor, *, num_columns: int) -> Tensor | None:
        # A gather wants equal parts; ranges differ by a column at most.
        widths = [
            num_columns * (rank + 1) // self.size - num_columns * rank // self.size
            for rank in range(self.size)
        ]
        padded = torch.nn.functional.pad(x_SV, (0, max(widths) - x_SV.shape[1])).contiguous()
        if self.rank != 0:
            dist.gather(padded, dst=0)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=0)
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )
