"""Loads LoRA adapters from the node's store into a rank's slots, and keeps recent ones packed."""

import torch

from quire.kernels.ops import AdapterLayers, AdapterSlots, PackedAdapter
from quire.worker.model.spec import ModelSpec
from quire.worker.parts.adapters.store import AdapterStore
from quire.worker.parts.adapters.weights import read_layers
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import AdapterError
from quire.worker.weights.loader import Shard


class RankAdapters:
    """Fills a program's slots. Before a step names an adapter, the engine has it read, checked and
    held in the store, so that loading it here only copies memory."""

    def __init__(
        self,
        slots: AdapterSlots,
        config: EngineConfig,
        spec: ModelSpec,
        *,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        """Allocates all slots."""
        slots.open(num_slots=config.max_loras, max_rank=config.max_lora_rank)
        self._slots = slots
        self._spec = spec
        self._shard = shard
        self._dtype = dtype
        self._max_rank = config.max_lora_rank
        self._max_kept = config.num_kept_loras
        # The least recently loaded adapter first.
        self._kept: dict[str, PackedAdapter] = {}
        self._store = AdapterStore()

    def load(self, loads: tuple[tuple[int, str], ...]) -> None:
        """Loads adapters: ``loads`` are slots and the digests of their adapters.

        Raises:
            AdapterError: An adapter is not in the store, or cannot be read.
        """
        for slot, digest in loads:
            adapter = self._kept.pop(digest, None)
            if adapter is None:
                adapter = self._slots.pack(self._read(digest))
            self._kept[digest] = adapter
            self._slots.set(slot, adapter)
        while len(self._kept) > self._max_kept:
            del self._kept[next(iter(self._kept))]

    def _read(self, digest: str) -> AdapterLayers:
        folder = self._store.folder(digest)
        if folder is None:
            raise AdapterError(f"{self._store.root} has no adapter {digest} any more")
        return read_layers(
            folder, self._spec, shard=self._shard, dtype=self._dtype, max_rank=self._max_rank
        )
