"""What an engine must know of its model besides how to run it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.worker.checkpoint import open_checkpoint, read_header
from quire.worker.config import EngineConfig
from quire.worker.model_config import (
    LlamaConfig,
    read_model_config,
    resolve_dtype,
    resolve_max_model_len,
)

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_NOT_IN_KV = ("bos_token_id", "eos_token_ids", "tie_word_embeddings", "dtype")
"""Fields of the model that its KV does not depend on; the KV's own type is hashed beside it."""


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


def model_facts(config: EngineConfig) -> ModelFacts:
    """The facts of the checkpoint ``config.model``. Reads little of it, and needs no torch.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: ``max_model_len`` is more than the checkpoint was trained for.
    """
    model = read_model_config(config.model)
    dtype = resolve_dtype(config, model)
    return ModelFacts(
        name=config.model.resolve().name,
        fingerprint=fingerprint(model, open_checkpoint(config.model).files),
        vocab_size=model.vocab_size,
        max_model_len=resolve_max_model_len(config, model),
        eos_token_ids=model.eos_token_ids,
        # KV computed in another type is not the same either once it is rounded.
        kv_dtype=dtype
        if config.kv_cache_dtype == "auto"
        else f"{config.kv_cache_dtype} of {dtype}",
    )


def fingerprint(model: LlamaConfig, files: tuple[Path, ...]) -> str:
    """SHA-256 over the model's shape and, of each weight file, size, header and 64 samples.

    A fine-tuned copy has the same headers and sizes; that is what the samples tell apart. They
    are spread evenly over the file, so 100 GB of weights cost some thousand small reads.
    """
    shape = {name: value for name, value in asdict(model).items() if name not in _NOT_IN_KV}
    state = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for file in files:
        header = read_header(file)
        size = file.stat().st_size
        state.update(f"{file.name} {size} ".encode() + header)
        first, last = 8 + len(header), max(8 + len(header), size - _SAMPLE_BYTES)
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(first + (last - first) * sample // (_SAMPLES - 1))
                state.update(stream.read(_SAMPLE_BYTES))
    return state.hexdigest()
