"""Symmetric memory, which the GPUs of a group map into each other's address space, and the
all-reduce with a fixed order over it (`quire.kernels.triton.all_reduce`)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLAG_BYTES = 4


class FixedOrder:
    """Sums tensors over the ranks of a group in one kernel, in the order of the ranks."""

    def __init__(self, *, rank: int, size: int, device: torch.device) -> None:
        """Maps the memory; blocks until all ranks have called it.

        Raises:
            RuntimeError: The GPUs cannot reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric

        from quire.kernels.triton import all_reduce as kernel

        self._kernel = kernel
        # A buffer and its flags for small tensors, then a buffer and its flags for large ones.
        sizes = (
            *(2 * kernel.MAX_BYTES, kernel.MAX_PROGRAMS * size * FLAG_BYTES),
            *(2 * kernel.TWO_SHOT_BYTES, kernel.TWO_SHOT_PROGRAMS * size * FLAG_BYTES),
        )
        self._memory = symmetric.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(
            self._memory, dist.distributed_c10d._get_default_group()
        )
        self._memory.zero_()
        torch.cuda.synchronize(device)
        dist.barrier()  # no rank may signal another before all flags are 0
        addresses = [
            self._handle.get_buffer(other, self._memory.shape, torch.uint8).data_ptr()
            for other in range(size)
        ]
        base_R = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._small, self._large = (
            kernel.Peers(
                rank=rank,
                size=size,
                buffers_R=base_R + sum(sizes[:first]),
                flags_R=base_R + sum(sizes[: first + 1]),
                epochs_P=torch.zeros(num_programs, dtype=torch.int32, device=device),
            )
            for first, num_programs in ((0, kernel.MAX_PROGRAMS), (2, kernel.TWO_SHOT_PROGRAMS))
        )

    def takes(self, x: Tensor) -> bool:
        return self._kernel.fits_two_shots(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums ``x`` over all ranks, in place. A value's bits are the same on every rank and do not
        depend on the rest of the tensor."""
        if self._kernel.fits(x):
            return self._kernel.all_reduce(x, self._small)
        return self._kernel.all_reduce_in_two_shots(x, self._large)


def open_fixed_order(*, rank: int, size: int, device: torch.device) -> FixedOrder | None:
    """A `FixedOrder`; ``None`` on all ranks unless every rank of the default group can open it."""
    fixed_order = None
    if size in (2, 4, 8) and _all_reach_each_other(size):
        try:
            fixed_order = FixedOrder(rank=rank, size=size, device=device)
        except (ImportError, RuntimeError):
            fixed_order = None
    # If one rank fails, the others must not wait for it.
    agreed = torch.tensor(int(fixed_order is not None), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return fixed_order if agreed.item() else None


def _all_reach_each_other(size: int) -> bool:
    return all(
        torch.cuda.can_device_access_peer(one, other)
        for one in range(size)
        for other in range(size)
        if one != other
    )
