"""Readers of the fields that most families' configurations share, by transformers' names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.worker.model.families.rotary import max_positions, rope
from quire.worker.model.spec import Activation, Attention, Experts, Layer, Mlp, ModelSpec, Norm
from quire.worker.weights.fields import Fields

Windows = tuple[int | None, ...]
"""The window of each layer."""
_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MULTIPLIERS = (
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    *("logits_scaling", "logit_scale"),
)
_OTHERS = (
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("no_rope_layers", "clip_qkv", "use_qk_norm", "use_bidirectional_attention"),
)
"""Fields that change what a model computes, and that only few families support."""


def decoder(
    config: Fields,
    *,
    attention: Attention | tuple[Attention, ...],
    mlp: Mlp | Experts | tuple[Mlp | Experts, ...],
    norm: Norm | None = None,
    layer: Mapping[str, Any] | None = None,
    knows: tuple[str, ...] = (),
    **model: Any,
) -> ModelSpec:
    """A model whose layers differ at most in attention and MLP.

    ``layer`` and ``model`` are further fields of `Layer` and `ModelSpec`. A configuration field
    that changes what is computed is refused, unless the family ``knows`` it.
    """
    for name in _MULTIPLIERS:
        if name not in knows and config.raw.get(name) not in (None, 1):
            raise config.refused(name, config.raw[name])
    for name in _OTHERS:
        if name not in knows and config.raw.get(name) not in (None, False):
            raise config.refused(name, config.raw[name])
    norm = norm or Norm(eps=config.number("rms_norm_eps", default=1e-6))
    if isinstance(attention, Attention):
        attention = (attention,) * config.count("num_hidden_layers")
    if isinstance(mlp, Mlp | Experts):
        mlp = (mlp,) * len(attention)
    pairs = list(zip(attention, mlp, strict=True))
    layers = {
        pair: Layer(attention=pair[0], mlp=pair[1], norm=norm, **(layer or {}))
        for pair in dict.fromkeys(pairs)
    }
    if "ropes" not in model:
        model["ropes"] = (rope(config, head_size=attention[0].key_size),)
    if "tied" not in model:
        model["tied"] = config.flag("tie_word_embeddings")
    return ModelSpec(
        hidden_size=config.count("hidden_size"),
        layers=tuple(layers[pair] for pair in pairs),
        final_norm=norm,
        vocab_size=config.count("vocab_size"),
        max_positions=max_positions(config),
        dtype=dtype_name(config),
        eos_token_ids=(),
        num_extra_layers=extra_layers(config),
        **model,
    )


def extra_layers(config: Fields) -> int:
    """The number of layers for multi-token prediction, after the last regular layer."""
    names = ("num_nextn_predict_layers", "num_mtp_modules")
    return max(config.count(name) if config.raw.get(name) else 0 for name in names)


def dtype_name(config: Fields) -> str:
    """The type of computation that the checkpoint asks for; "" if it names none."""
    dtype = str(config.raw.get("dtype") or config.raw.get("torch_dtype") or "")
    if not dtype:
        return dtype
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.refused("dtype", dtype, f"; one of {_DTYPES}")
    return dtype


def with_windows(attention: Attention, windows: Windows) -> tuple[Attention, ...]:
    """The attention of each layer, with its window."""
    return tuple(replace(attention, window=window) for window in windows)


def attention(config: Fields, *, head_size: int | None = None, **options: Any) -> Attention:
    """Attention with rotary embeddings and one head size; ``options`` are further fields of
    `Attention`.

    ``head_size`` is the default for a configuration without that field.
    """
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default=num_heads)
    hidden_size = config.count("hidden_size")
    default = head_size or max(1, hidden_size // num_heads)
    head_size = config.count("head_dim", default=default)
    if num_heads % num_kv_heads:
        raise config.broken(
            f"{num_heads} attention heads are no multiple of {num_kv_heads} KV heads"
        )
    if head_size < 2 or head_size % 2:
        raise config.broken(f"head size {head_size} must be even")
    shape = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "key_size": head_size,
        "value_size": head_size,
        "scale": head_size**-0.5,
        "rope": 0,
    }
    return Attention(**(shape | options))


def mlp(
    config: Fields, *, field: str = "hidden_act", activation: str = "silu", **options: Any
) -> Mlp:
    """An MLP. ``field`` is the field that names the activation, ``activation`` its default."""
    return Mlp(
        size=config.count("intermediate_size"),
        activation=config.choice(field, _ACTIVATIONS, default=activation),
        **options,
    )


def experts(
    config: Fields, *, size: str = "moe_intermediate_size", num: str = "num_experts", **options: Any
) -> Experts:
    """A mixture of experts. ``size`` and ``num`` are the fields with an expert's inner channels and
    the number of experts; ``options`` are further fields of `Experts`."""
    num_experts, top_k = config.count(num), config.count("num_experts_per_tok")
    if top_k > num_experts:
        raise config.broken(f"num_experts_per_tok={top_k} is more than the {num_experts} experts")
    if config.choice("hidden_act", _ACTIVATIONS, default="silu") != "silu":
        raise config.refused("hidden_act", config.raw["hidden_act"])
    return Experts(
        mlp=Mlp(size=config.count(size)), num_experts=num_experts, top_k=top_k, **options
    )


def windows(config: Fields) -> Windows:
    """Windows by ``use_sliding_window`` and Qwen's fields that select the layers."""
    num_layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window") or config.raw.get("sliding_window", 0) is None:
        return (None,) * num_layers
    window = config.count("sliding_window", default=4096)
    if not config.names("layer_types"):
        first = config.raw.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise config.wrong("max_window_layers", first, "an integer of 0 or more")
        full = min(first, num_layers)
        return (None,) * full + (window,) * (num_layers - full)
    return windows_by_type(config, window)


def windows_by_type(config: Fields, window: int | None, *, every: int | None = None) -> Windows:
    """Windows by ``layer_types``. Without that field, every ``every``-th layer has none."""
    num_layers = config.count("num_hidden_layers")
    kinds = config.names("layer_types")
    if not kinds and every is not None:
        return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
    meanings = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != num_layers or set(kinds) - set(meanings):
        raise config.wrong("layer_types", kinds, f"{num_layers} of {', '.join(meanings)}")
    return tuple(meanings[kind] for kind in kinds)
