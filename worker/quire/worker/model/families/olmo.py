"""OLMo 2 and 3: norms after attention and MLP, and over all heads of Q and of K; OLMo 3 has
windows."""

from dataclasses import replace
from typing import Any

from quire.worker.model.families.decoder import (
    attention,
    decoder,
    mlp,
    windows_by_type,
    with_windows,
)
from quire.worker.model.families.rotary import ropes_by_type
from quire.worker.model.spec import Attention, ModelSpec, Norm
from quire.worker.weights.fields import Fields

_THETA = 500_000.0


def olmo2(config: Fields) -> ModelSpec:
    return _olmo(config, (_attention(config),) * config.count("num_hidden_layers"))


def olmo3(config: Fields) -> ModelSpec:
    one = _attention(config)
    window = config.count("sliding_window", default=4096)
    layers = with_windows(one, windows_by_type(config, window, every=4))
    return _olmo(
        config,
        tuple(replace(each, rope=0 if each.window is None else 1) for each in layers),
        ropes=ropes_by_type(
            config,
            head_size=one.key_size,
            theta=_THETA,
            sliding_theta=config.number("rope_theta", default=_THETA),
        ),
    )


def _attention(config: Fields) -> Attention:
    bias = config.flag("attention_bias")
    return attention(config, qk_norm="whole", qkv_bias=bias, o_bias=bias)


def _olmo(config: Fields, layers: tuple[Attention, ...], **model: Any) -> ModelSpec:
    return decoder(
        config,
        attention=layers,
        mlp=mlp(config),
        norm=Norm(eps=config.number("rms_norm_eps", default=1e-5), wide=True),
        layer={"norms": ("attention_out", "mlp_out")},
        **model,
    )
