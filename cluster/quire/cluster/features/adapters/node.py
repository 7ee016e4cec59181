"""LoRA adapters on a gateway's node: fetched, checked against their model, and kept by digest."""

from pathlib import Path

from quire.worker.model.hub import fetch_adapter, fetch_text_files
from quire.worker.parts.adapters.reading import checker
from quire.worker.parts.adapters.store import AdapterStore, Held
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import AdapterError, CheckpointError
from quire.worker.weights.adapter_texts import check_texts


class NodeAdapters:
    """A `quire.cluster.features.adapters.keeper.Keeper` over the node's adapter store."""

    """A `quire.cluster.features.adapters.keeper.Keeper` over the node's adapter store."""

    def __init__(self, engine: EngineConfig, *, chat_template: str | None = None) -> None:
        """``engine``: the settings of the model that the adapters are for. ``chat_template``: the
        template that is used instead of its own."""
        self._store = AdapterStore(check=checker(engine))
        self._model = engine.model
        self._chat_template = chat_template

    def keep(self, source: str) -> str:
        """Fetches the adapter at ``source``, a folder or a name on the hub, checks all of it and
        keeps it; returns its digest.

        Raises:
            AdapterError: It cannot be fetched or read, or the model cannot run it. The store is as
                it was.
        """
        try:
            folder = fetch_adapter(Path(source))
            model = fetch_text_files(self._model)
            check_texts(folder, model, chat_template=self._chat_template)
        except CheckpointError as error:
            raise AdapterError(str(error)) from error
        return self._store.put(folder)

    def hold(self, digest: str) -> Held | None:
        """Protects an adapter's files from removal until the result is released or garbage
        collected; ``None`` if the node does not have them."""
        return self._store.hold(digest)

    def folder(self, digest: str) -> Path | None:
        """The folder with an adapter's files; ``None`` if the node does not have them."""
        return self._store.folder(digest)
