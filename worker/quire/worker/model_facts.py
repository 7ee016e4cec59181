"""What an engine must know of its model besides how to run it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The facts of one checkpoint that shape scheduling, validation and block hashes."""

    name: str
    """As users call it."""
    fingerprint: str
    """Differs whenever the weights do; the block hashes begin from it."""
    vocab_size: int
    """Token ids are below this."""
    max_model_len: int
    """Prompt + output, in tokens, that the model was trained for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text."""
    kv_dtype: str
    """Of the KV cache: KV of another type is not the same KV."""
