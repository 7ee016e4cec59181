"""The properties of a model that scheduling, validation and block hashes need."""

import hashlib
import json
from dataclasses import asdict, dataclass

from quire.worker.model.config import (
    check_settings,
    read_model_spec,
    resolve_dtype,
    resolve_max_model_len,
)
from quire.worker.model.hub import model_name
from quire.worker.model.pooling import Dense, LayerNorm, Pooling
from quire.worker.model.spec import ModelSpec
from quire.worker.request.config import EngineConfig
from quire.worker.request.request import Task
from quire.worker.weights.checkpoint import Checkpoint, open_checkpoint
from quire.worker.weights.digest import weight_digests

_NOT_IN_KV = (
    *("eos_token_ids", "tied", "dtype", "names"),
    *("num_extra_layers", "is_text_part", "untested", "has_head", "pooling"),
)
"""Fields of the model that its KV does not depend on. The type of the KV is hashed separately."""


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


def model_facts(config: EngineConfig, *, with_fingerprint: bool = True) -> ModelFacts:
    """The `ModelFacts` of the checkpoint ``config.model``. Needs no torch.

    The first fingerprint of a checkpoint on a node reads all its weights (`weights_digest`).

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: A setting does not fit this model.
    """
    spec = read_model_spec(config.model, model_impl=config.model_impl)
    check_settings(config, spec)
    dtype = resolve_dtype(config, spec)
    checkpoint = open_checkpoint(config.model)
    return ModelFacts(
        name=model_name(config.model),
        fingerprint=_fingerprint(config, spec, checkpoint) if with_fingerprint else "",
        vocab_size=spec.vocab_size,
        max_model_len=resolve_max_model_len(config, spec),
        eos_token_ids=spec.eos_token_ids,
        has_head=spec.has_head,
        is_encoder=spec.is_encoder,
        pooling=spec.pooling,
        # KV computed in another type differs even after rounding to the same type.
        kv_dtype=dtype
        if config.kv_cache_dtype == "auto"
        else f"{config.kv_cache_dtype} of {dtype}",
    )


def _fingerprint(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """SHA-256 over the model's description and every byte of its weights.

    All bytes are hashed, because a fine-tuned copy may differ in a few values only.
    """
    shape = {name: value for name, value in asdict(spec).items() if name not in _NOT_IN_KV}
    if config.quantization is not None:
        shape["quantization"] = config.quantization
    state = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for file, digest in weight_digests(checkpoint.path, checkpoint.files).items():
        state.update(f"{file.name} {digest} ".encode())
    for step in spec.pooling.steps if spec.pooling else ():
        if isinstance(step, Dense | LayerNorm):
            (digest,) = weight_digests(step.file.parent, (step.file,)).values()
            state.update(f"dense {digest} ".encode())
    return state.hexdigest()
