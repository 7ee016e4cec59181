"""Memory that the GPUs of a group map into each other, for `quire.kernels.triton_all_reduce`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLAG_BYTES = 4


class OneShot:
    """Sums small tensors over the ranks of a group in one kernel."""

    def __init__(self, *, rank: int, size: int, device: torch.device) -> None:
        """Meets the other ranks.

        Raises:
            RuntimeError: The GPUs cannot reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric

        from quire.kernels import triton_all_reduce as kernel

        self._kernel = kernel
        num_flags = kernel.MAX_PROGRAMS * size
        buffer_bytes = 2 * kernel.MAX_BYTES
        self._memory = symmetric.empty(
            buffer_bytes + num_flags * FLAG_BYTES, dtype=torch.uint8, device=device
        )
        self._handle: Any = symmetric.rendezvous(
            self._memory, dist.distributed_c10d._get_default_group()
        )
        self._memory.zero_()
        torch.cuda.synchronize(device)
        dist.barrier()  # nobody may be told anything before all flags are 0
        addresses = [
            self._handle.get_buffer(other, self._memory.shape, torch.uint8).data_ptr()
            for other in range(size)
        ]
        buffers_R = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._peers = kernel.Peers(
            rank=rank,
            size=size,
            buffers_R=buffers_R,
            flags_R=buffers_R + buffer_bytes,
            epochs_P=torch.zeros(kernel.MAX_PROGRAMS, dtype=torch.int32, device=device),
        )

    def takes(self, x: Tensor) -> bool:
        return self._kernel.fits(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in ``x`` itself; the same bits on every rank."""
        return self._kernel.all_reduce(x, self._peers)


def open_one_shot(*, rank: int, size: int, device: torch.device) -> OneShot | None:
    """`OneShot` where every rank of the default process group can have it, ``None`` elsewhere."""
    one_shot = None
    if size in (2, 4, 8) and _all_reach_each_other(size):
        try:
            one_shot = OneShot(rank=rank, size=size, device=device)
        except (ImportError, RuntimeError):
            one_shot = None
    # A rank that had no luck must not be waited for by the others.
    agreed = torch.tensor(int(one_shot is not None), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return one_shot if agreed.item() else None


def _all_reach_each_other(size: int) -> bool:
    return all(
        torch.cuda.can_device_access_peer(one, other)
        for one in range(size)
        for other in range(size)
        if one != other
    )
