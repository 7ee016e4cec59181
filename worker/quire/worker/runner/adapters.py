"""The adapters in one rank's slots, and those kept for the next time. They come from the store."""

import torch

from quire.kernels.ops import AdapterLayers, AdapterSlots, PackedAdapter
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import AdapterError
from quire.worker.model.adapters.store import AdapterStore
from quire.worker.model.adapters.weights import read_layers
from quire.worker.model.loader import Shard
from quire.worker.model.spec import ModelSpec


class RankAdapters:
    """Fills a program's slots. The engine has every adapter read, checked and held in the store
    before a step names it, so that loading it here takes as long as copying memory."""

    def __init__(
        self,
        slots: AdapterSlots,
        config: EngineConfig,
        spec: ModelSpec,
        *,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        """Makes room for all slots."""
        slots.open(num_slots=config.max_loras, max_rank=config.max_lora_rank)
        self._slots = slots
        self._spec = spec
        self._shard = shard
        self._dtype = dtype
        self._max_rank = config.max_lora_rank
        self._max_kept = config.num_kept_loras
        # The one first that was loaded longest ago.
        self._kept: dict[str, PackedAdapter] = {}
        self._store = AdapterStore()

    def load(self, loads: tuple[tuple[int, str], ...]) -> None:
        """Puts the adapters of these digests into these slots.

        Raises:
            AdapterError: One is not in the store, or cannot be read.
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
