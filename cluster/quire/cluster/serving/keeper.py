"""A LoRA adapter, and what keeps those of a model on a gateway's node."""

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
    """The directory or the hub's name that it came from."""
    digest: str
    """The digest of its content, by which engines, caches and groups know it."""
    held: object = field(default=None, repr=False, compare=False)
    """Keeps its files on this node, as long as this is referred to."""


class Keeper(Protocol):
    """Keeps a model's adapters on this node. Its calls are not for an event loop, but for `hold`
    and `folder`."""

    def keep(self, source: str) -> str:
        """Fetches an adapter, checks it whole and keeps it; returns its digest. Raises
        AdapterError; InvalidRequest: the model cannot run it."""

    def hold(self, digest: str) -> object:
        """What keeps it from being removed as long as it is referred to; ``None`` if it is not
        here."""

    def folder(self, digest: str) -> Path | None:
        """Where its files are; ``None`` if they are not here."""
