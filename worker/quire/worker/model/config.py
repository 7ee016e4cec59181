"""Reads and checks a checkpoint's description, from ``config.json`` or a GGUF file, and combines it
with an engine's settings. Does not import torch, so that a gateway can use it."""

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

from quire.worker.model.families.other import other
from quire.worker.model.families.own_code import refuse_own_code
from quire.worker.model.families.registry import FAMILIES
from quire.worker.model.families.wrappers import (
    architecture_of,
    text_part,
    untested_wrapper,
    with_defaults,
)
from quire.worker.model.pooling import Normalize, Pooling
from quire.worker.model.sentence_folder import SentenceFolder, is_classifier, read_sentence_folder
from quire.worker.model.sentence_settings import most_tokens
from quire.worker.model.spec import Attention, ModelSpec
from quire.worker.model.support import check_runnable
from quire.worker.request.config import EngineConfig, ModelImpl
from quire.worker.request.errors import CheckpointError, ConfigError, InvalidRequest
from quire.worker.request.sampling_params import PARAMETERS
from quire.worker.request.scoring import LogitScore
from quire.worker.weights.checkpoint import TensorInfo, open_checkpoint, read_json
from quire.worker.weights.fields import Fields
from quire.worker.weights.gguf.container import SUFFIX, find_gguf, read_model
from quire.worker.weights.gguf.describe import describe
from quire.worker.weights.gguf.names import stored_in_blocks
from quire.worker.weights.modules_file import MODULES
from quire.worker.weights.stored import read_stored_weights
from quire.worker.weights.tokenizer_config import named_token_id

_log = logging.getLogger(__name__)
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{"max_length": "max_tokens", "max_new_tokens": "max_tokens"},
}
"""Fields of ``generation_config.json``, and the request parameter that each corresponds to."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_USUAL_LAYERS, _MOST_LAYERS = 128, 4096
"""Fewer are not compared with the tensors; more are refused if there are no weight files yet."""
_EXPERTS = re.compile("([a-z]+_)*(num|n)_([a-z]+_)*experts(_[a-z_]+)?")
_MOST_EXPERTS = 4096
"""More than any model has. Some classes of transformers build a module for each."""
_NUMBER = re.compile("[0-9]{1,8}")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def check_path(model: Path) -> None:
    """Raises CheckpointError: ``model`` is neither a directory nor a GGUF file."""
    if model.is_dir() or find_gguf(model) is not None:
        return
    raise CheckpointError(
        f"{model}: {_what_instead(model)}; model must be a GGUF file or a checkpoint directory"
        f"{_which_files(model)}, or ORG/NAME of the Hugging Face hub"
    )


def read_model_spec(path: Path, *, model_impl: ModelImpl = "auto") -> ModelSpec:
    """Reads ``config.json`` in ``path`` (and the end tokens of ``generation_config.json`` and
    ``tokenizer_config.json``), or the metadata of the GGUF file at ``path``.

    ``model_impl`` is that of `EngineConfig`. Sampling parameters of ``generation_config.json`` are
    checked, with a warning, but not used.

    Raises:
        CheckpointError: The files are missing or damaged, or Quire does not support the model.
    """
    if (gguf := find_gguf(path)) is not None:
        return _of_gguf(gguf, model_impl)
    check_path(path)
    folder = read_sentence_folder(path)
    root, path = path, path if folder is None else folder.transformer
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: has no config.json; is it a Hugging Face checkpoint?")
    whole = Fields(read_json(file), file)
    text = text_part(whole)
    is_text_part, config = text is not None, text or whole
    written = config
    _check_layers(path, config)
    _check_experts(config)
    architecture = architecture_of(config)
    decoder = f"{architecture.removesuffix('Model')}ForCausalLM"
    is_bare = decoder in FAMILIES and architecture != decoder
    family = FAMILIES.get(decoder if is_bare else architecture)
    if family is None and model_impl == "quire":
        raise CheckpointError(
            f"{file}: architecture {architecture!r} is not supported with model_impl='quire'; "
            f"supported: {', '.join(FAMILIES)}; model_impl='auto' runs others through transformers"
        )
    is_causal = config.flag("is_causal", default=True)
    if model_impl == "transformers" or not is_causal:
        family = None
    if model_impl == "quire" and not is_causal:
        raise config.refused("is_causal", False, " with model_impl='quire'; leave that out")
    if family is not None:
        config = with_defaults(config, is_text_part=is_text_part)
    ignores_head = folder is not None and folder.pooling is not None and is_classifier(config)
    spec = other(config, for_states=ignores_head) if family is None else family(config)
    has_head = spec.has_head and not is_bare
    pooling = _pooling(root, folder, spec, has_head=has_head)
    as_a_whole = not is_causal or (pooling is not None and not pooling.is_causal)
    if pooling is not None and as_a_whole and not spec.is_encoder:
        if model_impl == "quire":
            raise CheckpointError(
                f"{path}: pools the {pooling.modes[0]} of a decoder's states, which "
                "model_impl='quire' does not; leave it out"
            )
        family, has_head = None, False
        spec = other(written, for_states=True)  # Pooling needs all states.
    spec = replace(
        spec,
        eos_token_ids=_eos_token_ids(path, config),
        stored=read_stored_weights(config),
        is_text_part=is_text_part,
        untested=untested_wrapper(whole) if is_text_part else "",
        dtype=spec.dtype or _dtype_of_weights(path),
        has_head=has_head,
        tied=spec.tied or is_bare,
        pooling=pooling,
    )
    if pooling is not None or folder is not None:
        limit = most_tokens(path) or spec.max_positions
        spec = replace(spec, max_positions=min(spec.max_positions, limit))
    refuse_own_code(whole, spec)
    if family is not None:
        check_runnable(spec, file)
        if spec.untested:
            raise whole.broken(spec.untested)
    return spec


def _pooling(
    path: Path, folder: SentenceFolder | None, spec: ModelSpec, *, has_head: bool
) -> Pooling | None:
    """How the model makes embeddings or a pair's logit; ``None`` if it only generates text.

    Without ``modules.json``, an encoder uses the mean, as in sentence-transformers, and a decoder
    the normalised state of the last token, as it was trained.

    Raises:
        CheckpointError: ``modules.json`` asks for a head that the model lacks.
    """
    if folder is None:
        if spec.pooling is not None or has_head:
            return spec.pooling
        steps = () if spec.is_encoder else (Normalize(),)
        return Pooling(modes=("mean" if spec.is_encoder else "last",), steps=steps)
    if folder.pooling is not None:
        return folder.pooling
    head, is_there = "classifier", spec.pooling is not None
    if isinstance(folder.scoring, LogitScore):
        head, is_there = "LM head", has_head
    if not is_there:
        raise CheckpointError(
            f"{path / MODULES}: the model scores by its {head}, which the architecture in "
            "config.json does not have"
        )
    return spec.pooling


def _of_gguf(file: Path, model_impl: ModelImpl) -> ModelSpec:
    if model_impl == "transformers":
        raise CheckpointError(
            f"{file}: model_impl='transformers' reads no GGUF files; leave it out, or serve the "
            "model's safetensors files"
        )
    header = read_model(file)
    config = Fields(describe(header), file)
    (architecture,) = config.names("architectures")
    spec = replace(
        FAMILIES[architecture](config),
        eos_token_ids=_eos_token_ids(file, config),
        stored=stored_in_blocks(header),
    )
    check_runnable(spec, file)
    return spec


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """The type of weights, activations and KV: "float32", "bfloat16" or "float16"."""
    return spec.dtype if config.dtype == "auto" else config.dtype


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest prompt + output.

    Raises:
        ConfigError: ``max_model_len`` is more than the checkpoint was trained for.
    """
    trained, in_step = spec.max_positions, config.max_num_batched_tokens
    if spec.is_encoder and in_step < (config.max_model_len or 0):
        raise ConfigError(
            f"max_model_len={config.max_model_len} and max_num_batched_tokens={in_step}: an "
            "encoder computes a text in one step; set max_num_batched_tokens to at least "
            "max_model_len"
        )
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the checkpoint was trained for {trained} "
            f"positions; set at most {trained}"
        )
    return config.max_model_len or (min(trained, in_step) if spec.is_encoder else trained)


def check_settings(config: EngineConfig, spec: ModelSpec) -> None:
    """Checks the settings that do not fit every model, as far as no device is needed.

    Raises:
        ConfigError: One of them does not fit this model.
    """
    check_parallel(spec, config.tensor_parallel_size)
    check_quantization(config, spec)
    check_adapters(config, spec)
    resolve_max_model_len(config, spec)
    if config.kv_cache_dtype == "fp8" and resolve_dtype(config, spec) == "float32":
        raise ConfigError(
            "kv_cache_dtype='fp8' with dtype='float32': the kernels read it with 16-bit queries; "
            "use dtype='bfloat16', or kv_cache_dtype='auto'"
        )


def check_quantization(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: weights that are stored in 4 bits would be quantised again."""
    if config.quantization is not None and spec.stored is not None and spec.stored.has_4_bits:
        raise ConfigError(
            f"quantization={config.quantization!r}: the checkpoint's weights have "
            "4 bits already; leave it out"
        )


def check_adapters(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError: adapters are enabled for a model that runs through transformers."""
    if config.enable_lora and spec.through_transformers is not None:
        kind = "an encoder" if spec.is_encoder else "a model that runs through transformers"
        raise ConfigError(
            f"enable_lora=True: {kind} takes no adapters; leave it out, or set it for other models "
            "alone, in a file of settings"
        )


def check_parallel(spec: ModelSpec, tensor_parallel_size: int) -> None:
    """Checks that the heads can be split among ``tensor_parallel_size`` ranks.

    The number of query heads must be divisible by the size. So must that of KV heads, or each KV
    head is replicated on the same number of ranks.

    Raises:
        ConfigError: They cannot be split; the message says which sizes work.
    """
    if spec.through_transformers is not None and tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: a model that runs through transformers "
            "runs on one rank; possible: 1"
        )
    for attention in dict.fromkeys(layer.attention for layer in spec.layers):
        if attention.qk_norm == "whole" and tensor_parallel_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size}: the model has norms over all heads "
                "of Q and of K together, which no rank has; possible: 1"
            )
        if _divides(attention, tensor_parallel_size):
            continue
        heads = attention.num_heads
        sizes = [size for size in range(1, heads + 1) if _divides(attention, size)]
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: cannot share {heads} attention heads "
            f"and {attention.num_kv_heads} KV heads; possible: {', '.join(map(str, sizes))}"
        )


def _divides(attention: Attention, size: int) -> bool:
    kv_heads = attention.num_kv_heads
    return attention.num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _check_layers(path: Path, config: Fields) -> None:
    """Raises CheckpointError: there are more layers than the weights have. The description of each
    of a million layers would take seconds and much memory before a tensor is missing."""
    for name in _LAYERS:
        count = config.raw.get(name)
        if not isinstance(count, int) or count <= _USUAL_LAYERS:
            continue
        tensors = _tensors(path)
        numbers = (part for each in tensors for part in each.split("."))
        there = max((int(part) + 1 for part in numbers if _NUMBER.fullmatch(part)), default=0)
        most = there if tensors else _MOST_LAYERS
        if count > max(most, _USUAL_LAYERS):
            raise config.wrong(name, count, f"the number of layers in the weights, at most {most}")


def _check_experts(config: Fields) -> None:
    for name, count in config.raw.items():
        if isinstance(count, int) and count > _MOST_EXPERTS and _EXPERTS.fullmatch(name):
            raise config.wrong(name, count, f"at most {_MOST_EXPERTS}")


def _tensors(path: Path) -> dict[str, TensorInfo]:
    """The tensors in ``path``; none if there are no weight files yet."""
    try:
        return open_checkpoint(path).tensors
    except CheckpointError:  # Raised again when the weights are read.
        return {}


def _dtype_of_weights(path: Path) -> str:
    """The type of most unquantised weights; float32 if there are no weight files yet."""
    sizes = dict.fromkeys(_DTYPES, 0)
    for info in _tensors(path).values():
        if info.dtype in sizes:
            sizes[info.dtype] += math.prod(info.shape)
    return _DTYPES[max(sizes, key=lambda each: sizes[each])]


def _eos_token_ids(path: Path, config: Fields) -> tuple[int, ...]:
    """The end tokens of ``generation_config.json`` if it has any, since chat models end turns by
    that list, else those of ``config``. The tokenizer's end token is added."""
    fields, generation = config, path / "generation_config.json"
    if generation.is_file():
        from_generation = Fields(read_json(generation), generation)
        _warn_of_sampling(from_generation)
        if from_generation.raw.get("eos_token_id") is not None:
            fields = from_generation
    eos = fields.raw.get("eos_token_id")
    vocab_size = config.count("vocab_size")
    token_ids = []
    for value in eos if isinstance(eos, list) else [] if eos is None else [eos]:
        token_id = Fields({"eos_token_id": value}, fields.file).token_id("eos_token_id")
        if token_id is None or not 0 <= token_id < vocab_size:
            # Such an id is never generated, so no text would ever end.
            raise fields.wrong("eos_token_id", value, f"a token of the vocabulary of {vocab_size}")
        token_ids.append(token_id)
    named = named_token_id(path, "eos_token")  # It alone may end a chat model's turns.
    if named is not None and named < vocab_size and named not in token_ids:
        token_ids.append(named)
    return tuple(token_ids)


def _warn_of_sampling(generation: Fields) -> None:
    """Logs sampling parameters with values that requests may not have; they are not used."""
    for name, parameter in _SAMPLING.items():
        value = generation.raw.get(name)
        if value is None:
            continue
        try:
            PARAMETERS[parameter].kept(name, value)
        except InvalidRequest as error:
            _log.warning("%s: %s; it is not used", generation.file, error)


def _what_instead(path: Path) -> str:
    if path.exists():
        return "a file, not a directory"
    return "no such file" if path.suffix == SUFFIX else "no such directory"


def _which_files(path: Path) -> str:
    """The hint for an error message, if ``path`` names a weight file and not its directory."""
    if path.suffix not in WEIGHT_SUFFIXES:
        return ""
    return " with config.json, safetensors files and a tokenizer, as Hugging Face has them"
