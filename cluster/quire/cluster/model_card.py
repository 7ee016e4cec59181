"""Checks whether a group serves the model that a gateway expects.

The first group that a gateway attaches to sets the facts that the configuration left open; each
later group must have the same. Otherwise block hashes, token ids or limits would differ between
gateway and group, which would look like a cache that never hits; or a stream that moves between two
groups would continue with other bits.
"""

from dataclasses import dataclass, fields
from typing import Self

from quire.cluster.errors import GroupMismatch
from quire.v1 import group_pb2 as pb
from quire.worker.request.model_card import ModelCard

_START_ALIKE = "start both with the same model and settings"
_HOW_TO_ROLL = (
    "a stream that moved between them would go on with other bits. It is used once no group of the "
    "former kind takes requests; to keep both, serve the new groups as an application of their own "
    "and move clients there"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """The facts of its model that a gateway was configured with. ``None`` adopts the first group's
    value."""

    model: str
    """Name under which the model is served."""
    block_size: int
    """Tokens per block of KV cache, as in the gateway's routing table."""
    model_fingerprint: str | None = None
    """Identifies the weights."""
    kv_dtype: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    numerics: str | None = None
    """Names everything besides the weights that decides the bits of a group's outputs."""

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        return cls(**{field.name: getattr(card, field.name) for field in fields(cls)})

    def check(self, description: pb.GroupDescription) -> None:
        """Raises GroupMismatch, naming the first field that differs and both values."""
        for field in fields(self):
            ours = getattr(self, field.name)
            theirs = getattr(description, field.name)
            if ours is not None and ours != theirs:
                remedy = _HOW_TO_ROLL if field.name == "numerics" else _START_ALIKE
                raise GroupMismatch(
                    f"group {description.group_id} has {field.name}={theirs!r}, this gateway "
                    f"{ours!r}: {remedy}"
                )
