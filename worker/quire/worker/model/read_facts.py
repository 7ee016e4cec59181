"""Reads the properties of a checkpoint that an engine needs, and computes its fingerprint."""

import hashlib
import json
from dataclasses import asdict

from quire.worker.model.config import (
    check_settings,
    read_model_spec,
    resolve_dtype,
    resolve_max_model_len,
)
from quire.worker.model.facts import ModelFacts
from quire.worker.model.hub import model_name
from quire.worker.model.pooling import Dense, LayerNorm
from quire.worker.model.spec import ModelSpec
from quire.worker.request.config import EngineConfig
from quire.worker.weights.checkpoint import Checkpoint, open_checkpoint
from quire.worker.weights.digest import weight_digests

_NOT_IN_KV = (
    *("eos_token_ids", "tied", "dtype", "names"),
    *("num_extra_layers", "is_text_part", "untested", "has_head", "pooling"),
)
"""Fields of the model that its KV does not depend on. The type of the KV is hashed separately."""


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
