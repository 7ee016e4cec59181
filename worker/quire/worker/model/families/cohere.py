"""Cohere's Command R: attention and MLP read the same layer norm. In the second generation, layers
with full attention have no positions, and the others have a window."""

from dataclasses import replace
from typing import Any

from quire.worker.model.families.decoder import (
    attention,
    decoder,
    mlp,
    windows_by_type,
    with_windows,
)
from quire.worker.model.families.rotary import rope
from quire.worker.model.spec import Attention, ModelSpec, Norm
from quire.worker.weights.fields import Fields


def cohere(config: Fields) -> ModelSpec:
    one = _attention(config)
    return _cohere(config, (one,) * config.count("num_hidden_layers"), theta=500_000.0)


def cohere2(config: Fields) -> ModelSpec:
    window = config.count("sliding_window", default=4096)
    every = config.count("sliding_window_pattern", default=4)
    layers = with_windows(_attention(config), windows_by_type(config, window, every=every))
    return _cohere(
        config,
        tuple(each if each.window else replace(each, rope=None) for each in layers),
        theta=10_000.0,
    )


def _attention(config: Fields) -> Attention:
    bias = config.flag("attention_bias")
    return attention(config, qkv_bias=bias, o_bias=bias)


def _cohere(config: Fields, layers: tuple[Attention, ...], *, theta: float) -> ModelSpec:
    layer: dict[str, Any] = {"norms": ("attention_in",), "parallel": True}
    head_size = layers[0].key_size
    return decoder(
        config,
        attention=layers,
        mlp=mlp(config),
        norm=Norm(kind="layer", eps=config.number("layer_norm_eps", default=1e-5)),
        layer=layer,
        ropes=(rope(config, head_size=head_size, theta=theta, interleaved=True),),
        logit_scale=config.number("logit_scale", default=0.0625),
        tied=config.flag("tie_word_embeddings", default=True),
        knows=("logit_scale",),
    )
