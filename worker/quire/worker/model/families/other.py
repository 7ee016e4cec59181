"""Reads the fields that an engine and its gateways need of any other decoder, and of any encoder,
which run through transformers.

A model that cannot work is refused here, before its weights are downloaded, if ``config.json``
shows it. `quire.worker.model.through.dry_run` checks the rest.
"""

import json

from quire.worker.model.families.decoder import dtype_name, extra_layers
from quire.worker.model.families.rotary import max_positions
from quire.worker.model.families.wrappers import architecture_of, may_have
from quire.worker.model.pooling import Pooling
from quire.worker.model.sentence_folder import CLASSIFIER
from quire.worker.model.spec import ModelSpec, Norm
from quire.worker.weights.fields import Fields

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_ENDINGS = ("ForCausalLM", "LMHeadModel")
_WITHOUT_HEAD = ("Model", "ForMaskedLM", CLASSIFIER)
AFTER_PADDING = {
    **dict.fromkeys(("camembert", "roberta", "roberta-prelayernorm", "xlm-roberta"), 1),
    **dict.fromkeys(("data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "xmod"), 1),
    **{"xlm-roberta-xl": 1, "lilt": 0, "markuplm": 0},
}
"""Models whose position ids start after that of the padding token, and its default id. A dry run
refuses others that count so."""
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_ALIBI = ("bloom", "mpt")
_NO_ATTENTION = (
    *("mamba", "ssm_", "rwkv", "linear_num_", "linear_conv_", "lru_", "conv_L", "short_conv"),
    *("state_size", "conv_kernel", "time_step_", "attention_hidden_size"),
    *("attn_layer_period", "hybrid_override_pattern"),
)
"""Prefixes of fields that only models with recurrent layer states or convolutions have."""
_SPARSE = ("index_topk", "index_n_heads", "index_head_dim", "nsa_", "moba_")
_NOT_IN_RESULTS = (
    *("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "use_cache"),
    *("_name_or_path", "transformers_version", "quantization_config", "auto_map"),
)


def other(config: Fields, *, for_states: bool = False) -> ModelSpec:
    """A model that runs through transformers. ``for_states`` leaves out its LM head or classifier,
    and computes each text as a whole.

    Raises:
        CheckpointError: It has no decoder, or one that does not work with a paged KV cache.
    """
    raw, model_type = config.raw, str(config.raw.get("model_type", "unknown"))
    name = architecture_of(config)
    if config.flag("is_encoder_decoder"):
        if name.endswith("EncoderModel"):
            raise config.broken(
                f"{name} is the encoder of a model with an encoder and a decoder, whose attention "
                "has biases by position, which ours does not compute"
            )
        raise config.broken(f"{name} has an encoder and a decoder; only decoders run")
    has_head = (name == model_type or name.endswith(_ENDINGS)) and not for_states
    if not has_head and not for_states and not name.endswith(_WITHOUT_HEAD):
        known = " or ".join(f"…{ending}" for ending in (*_ENDINGS, *_WITHOUT_HEAD))
        raise config.broken(
            f"architecture {name!r} is not supported: it is no decoder or encoder of text ({known})"
        )
    is_classifier = name.endswith(CLASSIFIER) and not for_states
    if is_classifier and (labels := _num_labels(config)) != 1:
        raise config.broken(f"{name} has {labels} labels: a model that scores pairs has one")
    first = 0
    if model_type in AFTER_PADDING:
        padding = config.token_id("pad_token_id")
        first = 1 + (AFTER_PADDING[model_type] if padding is None else padding)
    if first and has_head:
        raise config.broken(
            f"{name} has positions after the padding token's, which run in encoders only"
        )
    if model_type in _ALIBI or raw.get("alibi"):
        raise config.broken(f"{name} has alibi, which our attention does not compute")
    for field, value in raw.items():
        if value in (None, False, 0, []):
            continue
        if field.startswith(_SPARSE):
            raise config.broken(f"{name} has {field}: attention that selects tokens")
        if field.startswith("rope") and not _is_finite(value):
            raise config.wrong(field, value, "without NaN and infinity")
    refuse_states(config)
    if raw.get("num_kv_shared_layers"):
        raise config.broken(f"{name} has num_kv_shared_layers: layers that share their KV")
    kind_suffices = name == model_type or not has_head
    if not may_have(name) and not (kind_suffices and may_have(model_type)):
        raise config.broken(unknown(name))
    results = {key: value for key, value in raw.items() if key not in _NOT_IN_RESULTS}
    return ModelSpec(
        hidden_size=config.count(_first(config, _HIDDEN)),
        layers=(),
        ropes=(),
        final_norm=Norm(eps=1e-6),
        vocab_size=config.count("vocab_size"),
        max_positions=max_positions(config, _first(config, _POSITIONS)) - first,
        tied=False,
        dtype=dtype_name(config),
        eos_token_ids=(),
        num_extra_layers=extra_layers(config),
        through_transformers=json.dumps(results, sort_keys=True),
        has_head=has_head,
        is_encoder=not has_head,
        first_position=first,
        pooling=Pooling(modes=("classifier",), reads_pairs=True) if is_classifier else None,
    )


def unknown(architecture: str) -> str:
    """The reason for which a model is refused that nothing here can compute."""
    return (
        f"architecture {architecture!r} is not supported: neither Quire nor the installed "
        "transformers has it, and code that comes with a checkpoint (trust_remote_code) is not run"
    )


def refuse_states(config: Fields) -> None:
    """Raises CheckpointError: some layers have no attention, or select the tokens to attend to.

    If the configuration lists the layers' types, fields for other types are ignored.
    """
    name = architecture_of(config)
    kinds = config.names("layer_types") or config.names("layers_block_type")
    for kind in kinds:
        if kind not in _LAYERS:
            raise config.broken(f"{name} has layers of type {kind!r}, which are not supported")
    for field, value in config.raw.items():
        is_said = value not in (None, False, 0, [])
        if not kinds and is_said and field.startswith(_NO_ATTENTION):
            raise config.broken(
                f"{name} has {field}: layers with a state or a convolution, which no KV cache holds"
            )


def _num_labels(config: Fields) -> int:
    names = config.section("id2label").raw
    return len(names) if names else config.count("num_labels", default=2)


def _first(config: Fields, names: tuple[str, ...]) -> str:
    """The first of ``names`` that is a field of the configuration."""
    return next((name for name in names if config.raw.get(name) is not None), names[0])


def _is_finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
