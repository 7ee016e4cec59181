"""The properties of a model that scheduling, validation and block hashes need."""

from dataclasses import dataclass

from quire.worker.model.pooling import Pooling
from quire.worker.request.request import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The properties of one checkpoint that scheduling, validation and block hashes depend on."""

    name: str
    """The name under which users request the model."""
    fingerprint: str
    """A hash of the weights and of how they are used, from which block hashes start. Empty if block
    hashes never leave the process."""
    vocab_size: int
    """The number of token ids."""
    max_model_len: int
    """The longest prompt + output, in tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text."""
    kv_dtype: str
    """Type of the KV cache, part of the block hashes: KV of two types is not interchangeable."""
    has_head: bool = True
    """Whether the model generates text."""
    is_encoder: bool = False
    """Whether a text is computed as a whole, so that its KV cannot be reused."""
    pooling: Pooling | None = None
    """How the model makes embeddings; ``None`` if it does not."""
    numerics: str = ""
    """Everything else that determines the bits of outputs (`quire.worker.model.numerics`); known
    once the ranks run."""

    @property
    def task(self) -> Task:
        """What the model is used for. A model trained for embeddings may have an LM head too."""
        return "generate" if self.pooling is None else "embed"
