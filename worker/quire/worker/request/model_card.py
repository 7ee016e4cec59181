"""Facts on which a gateway and a group must agree before they exchange requests."""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """The model that a gateway's groups serve."""

    model: str
    """Name under which the model is served."""
    model_fingerprint: str
    """A digest of the weights."""
    kv_dtype: str
    block_size: int
    """Tokens of KV cache in a block."""
    max_model_len: int
    vocab_size: int
    numerics: str
    """Everything besides the weights that determines the bits of a group's outputs."""

    @classmethod
    def of(cls, description: object) -> Self:
        """The card of an object that has these fields, such as a `GroupDescription`."""
        return cls(**{field.name: getattr(description, field.name) for field in fields(cls)})

    def differs_in_numerics_at_most(self, other: "ModelCard | None") -> bool:
        """Whether the cards are equal apart from ``numerics``."""
        return other is not None and replace(self, numerics=other.numerics) == other
