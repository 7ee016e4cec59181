"""Copies whole blocks within one rank's KV cache, and between it and host memory.

The cache has a tensor for K and one for V of each layer, with this rank's heads. Host memory has a
block's bytes in one piece, with all heads (`quire.worker.blocks.kv_format`). A rank writes and
reads its own heads there. If several ranks have the same head, the first of them writes it, and the
others wait for it before they read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.native.copies import PieceCopies
from quire.kernels.ops import KvCache
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.rank.staging import stage
from quire.worker.request.arrays import Ints
from quire.worker.weights.loader import Shard

# X copies, or blocks in host memory   C bytes of a block   N blocks of the cache   K heads of this
# rank   A = 2 * layers, K and V of each   T tokens   W words of a token in one head

CACHE, HOST = 0, 1
"""Numbers of the tiers in `StepInput.copies_X22`."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayout:
    """The memory layouts of blocks in the cache and outside."""

    format: KvFormat
    is_head_major: bool
    """See `quire.kernels.backend.AttentionBackend.is_head_major`."""


class BlockCopies:
    """Makes the block copies of steps on one rank. On a GPU, queues them on the current stream."""

    def __init__(
        self,
        kv: KvCache,
        *,
        layout: CacheLayout,
        shard: Shard,
        host_blocks_XC: Bytes | None,
        meet: Callable[[], object] = lambda: None,
    ) -> None:
        """On a GPU, pins host memory until the process ends. ``meet`` is a barrier: it waits until
        all ranks have called it."""
        first, end = shard.kv_heads(layout.format.num_kv_heads)
        before = Shard(rank=max(0, shard.rank - 1), size=shard.size)
        self._writes = shard.rank == 0 or before.kv_heads(layout.format.num_kv_heads)[0] != first
        self._shares_heads = shard.size > layout.format.num_kv_heads
        self._meet = meet
        caches = [cache for layer in kv for cache in layer]
        self._device = caches[0].device
        self._caches = [_by_heads(cache, is_head_major=layout.is_head_major) for cache in caches]
        self._sizes = [len(caches[0])]
        self._native: PieceCopies | None = None
        if host_blocks_XC is not None:
            self._sizes.append(len(host_blocks_XC))
            words = self._caches[0]
            host_XC = _on_device(host_blocks_XC, self._device).view(words.dtype)
            shape = (len(caches), layout.format.num_kv_heads, *words.shape[2:])
            self._host_XAKTW = host_XC.view(-1, *shape)[:, :, first:end]
            if layout.is_head_major and self._device.type == "cpu":
                self._native = PieceCopies(
                    [cache.flatten(1) for cache in self._caches], self._host_XAKTW.flatten(2)
                )

    def run(self, copies_X22: Ints) -> None:
        """Makes the copies of a step.

        Raises:
            IndexError: A tier, or a block in it, does not exist.
            ValueError: A copy is from host memory to host memory, which no step needs.
        """
        for number, (tiers, places_X2) in enumerate(_runs(copies_X22)):
            if number and self._shares_heads:
                self._meet()
            for tier, place in zip(tiers, places_X2.T, strict=True):
                self._check(tier, place)
            if tiers == (HOST, HOST):
                raise ValueError("copies within host memory: there are none")
            if tiers == (CACHE, HOST) and not self._writes:
                continue
            from_X, to_X = _last_of_each(places_X2).T.astype(np.int64)
            if self._native is not None and tiers != (CACHE, CACHE):
                goes_out = tiers == (CACHE, HOST)
                blocks_X, slots_X = (from_X, to_X) if goes_out else (to_X, from_X)
                self._native.run(blocks_X, slots_X, goes_out=goes_out)
                continue
            self._copy(tiers, *stage([from_X, to_X], self._device))

    def _copy(self, tiers: tuple[int, int], from_X: Tensor, to_X: Tensor) -> None:
        """The same copies as `PieceCopies`, in PyTorch."""
        for number, cache_NKTW in enumerate(self._caches):
            source = self._host_XAKTW[:, number] if tiers[0] == HOST else cache_NKTW
            target = self._host_XAKTW[:, number] if tiers[1] == HOST else cache_NKTW
            target[to_X] = source[from_X]

    def _check(self, tier: int, places_X: Ints) -> None:
        if not 0 <= tier < len(self._sizes):
            raise IndexError(f"tier {tier}: must be below {len(self._sizes)}")
        least, most = int(places_X.min()), int(places_X.max())
        if least < 0 or most >= self._sizes[tier]:
            place = least if least < 0 else most
            raise IndexError(f"block {place} of tier {tier}: must be below {self._sizes[tier]}")


def _runs(copies_X22: Ints) -> Iterator[tuple[tuple[int, int], Ints]]:
    """Splits the copies into runs between the same two tiers: the tiers, and source and target
    blocks."""
    tiers_X2 = copies_X22[:, :, 0]
    bounds = np.flatnonzero((tiers_X2[1:] != tiers_X2[:-1]).any(axis=1)) + 1
    for run_X22 in np.split(copies_X22, bounds):
        if len(run_X22):
            source, target = run_X22[0, :, 0].tolist()
            yield (source, target), run_X22[:, :, 1]


def _last_of_each(places_X2: Ints) -> Ints:
    """Drops copies whose target a later copy overwrites, so that the others can be made at once."""
    targets = places_X2[:, 1].tolist()
    if len(set(targets)) == len(targets):
        return places_X2
    last = {target: number for number, target in enumerate(targets)}
    return places_X2[sorted(last.values())]


def _by_heads(cache: Tensor, *, is_head_major: bool) -> Tensor:
    """A view ``[N, K, T, W]`` of one cache, in the widest words that divide a token's head."""
    num_blocks, num_tokens, num_heads, width = cache.shape
    num_bytes = width * cache.element_size()
    word = next(size for size in _WORDS if num_bytes % size == 0)
    words = cache.view(torch.uint8).view(_WORDS[word])
    if is_head_major:
        return words.view(num_blocks, num_heads, num_tokens, num_bytes // word)
    return words.transpose(1, 2)


def _on_device(host_blocks_XC: Bytes, device: torch.device) -> Tensor:
    """Host memory as a tensor that the device can access."""
    if device.type != "cuda":
        return torch.from_numpy(host_blocks_XC)
    runtime: Any = torch.cuda
    address = host_blocks_XC.ctypes.data
    torch.cuda.check_error(runtime.cudart().cudaHostRegister(address, host_blocks_XC.nbytes, 0))
    # Kernels access pinned memory at its host address, so that one launch copies scattered blocks
    # of one layer. With the runtime's copies, each piece would take a call.
    return torch.as_tensor(_Pinned(host_blocks_XC), device=device)


class _Pinned:
    """Pinned memory with the interface by which torch imports another library's GPU array."""

    def __init__(self, host_blocks_XC: Bytes) -> None:
        self._host_blocks_XC = host_blocks_XC  # Keeps the memory mapped.
        self.__cuda_array_interface__ = {
            "shape": host_blocks_XC.shape,
            "typestr": "|u1",
            "data": (host_blocks_XC.ctypes.data, False),
            "version": 3,
        }
