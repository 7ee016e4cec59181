"""Llama and close relatives: Mistral and Ministral with windows, SmolLM3 with layers without
positions."""

from dataclasses import replace

from quire.worker.model.families.decoder import (
    attention,
    decoder,
    mlp,
    windows,
    windows_by_type,
    with_windows,
)
from quire.worker.model.families.rotary import rope, rope_section
from quire.worker.model.spec import ModelSpec, Norm
from quire.worker.weights.fields import Fields

_MISTRAL_WINDOW = 4096
_BETA = "llama_4_scaling_beta"


def llama(config: Fields, *, window: int | None = None) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder(
        config,
        attention=attention(config, window=window, qkv_bias=bias, o_bias=bias),
        mlp=mlp(config, bias=config.flag("mlp_bias")),
    )


def mistral(config: Fields) -> ModelSpec:
    """Mistral: a ``sliding_window`` of null means none, and a missing field means 4096."""
    kinds = set(config.names("layer_types"))
    if len(kinds) > 1:
        raise config.broken(
            f"layer_types has {' and '.join(sorted(kinds))}: in MistralForCausalLM all layers are "
            "of one kind; MinistralForCausalLM may have both"
        )
    return llama(config, window=_window(config, _MISTRAL_WINDOW))


def ministral(config: Fields) -> ModelSpec:
    window = _window(config, _MISTRAL_WINDOW)
    layers = (window,) * config.count("num_hidden_layers")
    if config.names("layer_types"):
        layers = windows_by_type(config, window)
    return decoder(config, attention=with_windows(attention(config), layers), mlp=mlp(config))


def ministral3(config: Fields) -> ModelSpec:
    """Ministral 3: queries are scaled by the logarithm of position / original context."""
    config.refuse("layer_types")
    if not rope_section(config).raw:
        raise config.broken("rope_parameters are missing")
    rotated = attention(config, head_size=128, window=_window(config, None))
    table = rope(config, head_size=rotated.key_size, knows=(_BETA,))
    scaling = rope_section(config)
    if scaling.raw.get(_BETA):
        rotated = replace(
            rotated,
            position_scale=scaling.number(_BETA, default=0.0),
            position_period=table.original_max_positions,
        )
    return decoder(
        config,
        attention=rotated,
        mlp=mlp(config),
        norm=Norm(eps=config.number("rms_norm_eps", default=1e-5)),
        ropes=(table,),
    )


def smollm3(config: Fields) -> ModelSpec:
    num_layers = config.count("num_hidden_layers")
    interval = config.count("no_rope_layer_interval", default=4)
    rotates = config.raw.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(num_layers)
    ]
    if len(rotates) != num_layers or set(rotates) - {0, 1}:
        raise config.wrong("no_rope_layers", rotates, f"{num_layers} of 0 and 1, 1 for RoPE")
    bias = config.flag("attention_bias")
    one = attention(config, qkv_bias=bias, o_bias=bias)
    layers = zip(with_windows(one, windows(config)), rotates, strict=True)
    return decoder(
        config,
        attention=tuple(each if turns else replace(each, rope=None) for each, turns in layers),
        mlp=mlp(config, bias=config.flag("mlp_bias")),
        ropes=(rope(config, head_size=one.key_size, theta=2_000_000.0),),
        tied=config.flag("tie_word_embeddings", default=True),
        knows=("no_rope_layers",),
    )


def _window(config: Fields, default: int | None) -> int | None:
    if config.raw.get("sliding_window", default) is None:
        return None
    return config.count("sliding_window", default=default)
