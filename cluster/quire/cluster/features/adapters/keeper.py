"""LoRA adapters as gateways know them, and the interface that keeps their files on a node."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter that requests can name as their model."""

    name: str
    model: str
    """The name of the model that it belongs to."""
    source: str
    """The directory or the hub's name that the adapter was loaded from."""
    digest: str
    """The digest of the adapter's content, by which engines, caches and groups identify it."""
    held: object = field(default=None, repr=False, compare=False)
    """A reference that protects the adapter's files on this node from removal while it exists."""


class Keeper(Protocol):
    """Keeps a model's adapters on this node. `keep` blocks and must not be called in an event
    loop."""

    def keep(self, source: str) -> str:
        """Fetches an adapter, checks all of it and keeps it; returns its digest. Raises
        AdapterError; InvalidRequest: the model cannot run it."""

    def hold(self, digest: str) -> object:
        """A reference that protects an adapter's files from removal while it exists; ``None`` if
        the node does not have them."""

    def folder(self, digest: str) -> Path | None:
        """The folder with an adapter's files; ``None`` if the node does not have them."""
