"""LoRA adapters on one node: fetched, checked against their model, and kept by digest."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import AdapterError, CheckpointError
from quire.worker.model.adapters.peft import check_adapter
from quire.worker.model.adapters.store import AdapterStore, Held
from quire.worker.model.config import read_model_spec, resolve_dtype
from quire.worker.model.hub import fetch_adapter, fetch_text_files


class NodeAdapters:
    """The adapters in this node's store, for the models of one cluster. Its calls read files: not
    for an event loop, but for `folder` and `hold`."""

    def __init__(
        self, engines: Mapping[str, EngineConfig], *, store: AdapterStore | None = None
    ) -> None:
        """``engines``: each model's settings, by its name."""
        self.store = store or AdapterStore()
        self._engines = engines
        self._spec = cache(read_model_spec)

    def keep(self, source: str, *, model: str) -> str:
        """Fetches the adapter at ``source``, a folder or a name on the hub, and keeps it; returns
        its digest.

        Raises:
            AdapterError: It cannot be fetched or read, or the model cannot run it.
        """
        try:
            folder = fetch_adapter(Path(source))
        except CheckpointError as error:
            raise AdapterError(str(error)) from error
        digest = self.store.put(folder)
        self.check(digest, model=model)
        return digest

    def check(self, digest: str, *, model: str) -> None:
        """Reads the whole adapter. Raises AdapterError: it is not here, or the model cannot run
        it."""
        engine = self._engines[model]
        with_model = fetch_text_files(engine.model)
        spec = self._spec(with_model, model_impl=engine.model_impl)
        held = self.store.hold(digest)
        if held is None:
            raise AdapterError(f"the adapter {digest} is not in {self.store.root}: load it again")
        try:
            check_adapter(
                held.folder,
                spec,
                max_rank=engine.max_lora_rank,
                dtype=resolve_dtype(engine, spec),
            )
        finally:
            held.release()

    def folder(self, digest: str) -> Path | None:
        """Where its files are; ``None`` if they are not here."""
        return self.store.folder(digest)

    def hold(self, digest: str) -> Held | None:
        """Keeps it from being removed until the result is released or forgotten; ``None`` if it
        is not here."""
        return self.store.hold(digest)
