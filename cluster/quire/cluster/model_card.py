"""What gateways and groups must agree on before a request passes between them.

The first group that a gateway meets fixes what its configuration left open; each later one has
to say the same. Otherwise block hashes, token ids or limits would mean different things on the
two sides, and the damage would look like a cache that never hits.
"""

from dataclasses import dataclass, fields
from typing import Self

from quire.cluster.errors import GroupMismatch
from quire.v1 import group_pb2 as pb
from quire.worker.hashing import BlockHash, root_hash


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a gateway was told of its model. ``None`` takes the first group's word."""

    model: str
    """Name under which the model is served."""
    block_size: int
    """Tokens of KV cache in a block; that of the gateway's routing table."""
    model_fingerprint: str | None = None
    """Covers the weights."""
    kv_dtype: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None

    def check(self, description: pb.GroupDescription) -> None:
        """Raises GroupMismatch, naming the first field that differs and both values."""
        for field in fields(self):
            ours = getattr(self, field.name)
            theirs = getattr(description, field.name)
            if ours is not None and ours != theirs:
                raise GroupMismatch(
                    f"group {description.group_id} has {field.name}={theirs!r}, this gateway "
                    f"{ours!r}: start both with the same model and settings"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """The model that a gateway's groups serve."""

    model: str
    model_fingerprint: str
    kv_dtype: str
    block_size: int
    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, description: pb.GroupDescription) -> Self:
        return cls(**{field.name: getattr(description, field.name) for field in fields(cls)})

    def expectation(self) -> Expectation:
        return Expectation(
            **{field.name: getattr(self, field.name) for field in fields(Expectation)}
        )

    def root(self, *, cache_salt: str) -> BlockHash:
        """The hash from which block chains of this model begin, for one tenant."""
        return root_hash(
            model_fingerprint=self.model_fingerprint,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            cache_salt=cache_salt,
        )
