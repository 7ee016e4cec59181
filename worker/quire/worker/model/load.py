"""Loads one rank's model: as Quire's own program of operations, or through transformers."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import AttentionBackend, backend_for
from quire.kernels.ops import ProgramRunner
from quire.worker.model.program import attention_options, make_program
from quire.worker.model.spec import Attention, ModelSpec
from quire.worker.request.config import EngineConfig
from quire.worker.weights.checkpoint import (
    Checkpoint,
    bare_decoder,
    open_checkpoint,
    text_part,
)
from quire.worker.weights.loader import Shard, Weights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model with its weights."""

    runner: ProgramRunner
    attentions: tuple[Attention, ...]
    """The attention of each layer, in the order of the KV cache."""
    options: tuple[AttentionOptions, ...]
    is_head_major: bool
    """Memory layout of a block of the KV cache: see `AttentionBackend.is_head_major`."""


def load_model(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> Loaded:
    """Reads this rank's share of the weights, and logs which backend computes the model and why.

    Raises:
        CheckpointError: The files cannot be read, or transformers cannot run such a model here.
        ConfigError: No kernels support the given settings.
    """
    if spec.through_transformers is not None:
        return _through_transformers(
            config, dtype=dtype, device=device, max_model_len=max_model_len, spec=spec
        )
    _log.info("%s: computed by quire, which describes this family", config.model)
    options = tuple(attention_options(each, max_model_len) for each in spec.attentions)
    backend = backend_for(device, quantization=config.quantization, options=set(options))
    checkpoint = _checkpoint(config.model, spec)
    if checkpoint.decoded and shard.rank == 0:
        _log.info("%s: %s", config.model, checkpoint.decoded)
    with Weights.open(checkpoint, dtype=dtype, device=device, stored=spec.stored) as weights:
        program = make_program(
            spec, weights, shard=shard, backend=backend, max_model_len=max_model_len
        )
        weights.refuse_unread(spec)
    runner = backend.prepare(program)
    return _loaded(runner, spec.attentions, options, backend=backend, dtype=dtype)


def _checkpoint(model: Path, spec: ModelSpec) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    if not spec.has_head and not spec.is_encoder:
        return bare_decoder(checkpoint)
    if not spec.is_text_part:
        return checkpoint
    _log.warning("%s: its text part is served; other parts of the model are left out", model)
    return text_part(checkpoint)


def find_attentions(
    config: EngineConfig, spec: ModelSpec, *, dtype: torch.dtype, max_model_len: int
) -> tuple[Attention, ...]:
    """The attention of each layer, without reading weights. Raises as `load_model`."""
    if spec.through_transformers is None:
        return spec.attentions
    from quire.worker.model.through.dry_run import dry_run

    found = dry_run(
        config.model,
        spec,
        dtype=dtype,
        max_model_len=max_model_len,
        is_deterministic=config.deterministic,
    )
    return tuple(found.attentions)


def _through_transformers(
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    spec: ModelSpec,
) -> Loaded:
    # Imported here because it takes a second that other models need not spend.
    from quire.worker.model.through.dry_run import dry_run
    from quire.worker.model.through.runner import ThroughTransformers

    checkpoint = _checkpoint(config.model, spec)
    found = dry_run(
        config.model,
        spec,
        dtype=dtype,
        max_model_len=max_model_len,
        is_deterministic=config.deterministic,
        on_gpu=device.type == "cuda",
    )
    why = "model_impl='transformers'"
    if config.model_impl == "auto":
        why = "quire has no description of this architecture"
    if spec.is_encoder:
        _log.info("%s: an encoder, computed by transformers' modules", config.model)
    else:
        _log.warning("%s: computed through transformers, somewhat slower: %s", config.model, why)
    options = tuple(attention_options(each, max_model_len) for each in found.attentions)
    backend = backend_for(device, quantization=config.quantization)
    on_cpu = torch.device("cpu")
    with Weights.open(checkpoint, dtype=dtype, device=on_cpu, stored=spec.stored) as weights:
        runner = ThroughTransformers(weights, spec, found, options, device=device, backend=backend)
    return _loaded(runner, tuple(found.attentions), options, backend=backend, dtype=dtype)


def _loaded(
    runner: ProgramRunner,
    attentions: tuple[Attention, ...],
    options: tuple[AttentionOptions, ...],
    *,
    backend: AttentionBackend,
    dtype: torch.dtype,
) -> Loaded:
    return Loaded(
        runner=runner,
        attentions=attentions,
        options=options,
        is_head_major=backend.is_head_major(dtype, attentions[0].cached_size),
    )
