"""Granite: a Llama with four multipliers. In Granite 4 the MLP is named like shared experts."""

from dataclasses import replace
from typing import Any

from quire.worker.model.families.decoder import attention, decoder, mlp
from quire.worker.model.families.other import refuse_states
from quire.worker.model.spec import ModelSpec, TensorNames
from quire.worker.weights.fields import Fields


def granite(config: Fields, **model: Any) -> ModelSpec:
    bias = config.flag("attention_bias")
    scale = config.number("attention_multiplier", default=1.0)
    return decoder(
        config,
        attention=attention(config, scale=scale, qkv_bias=bias, o_bias=bias),
        mlp=mlp(config, bias=config.flag("mlp_bias")),
        layer={"residual_scale": config.number("residual_multiplier", default=1.0)},
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        logit_scale=1 / config.number("logits_scaling", default=1.0),
        knows=(
            "attention_multiplier",
            "residual_multiplier",
            "embedding_multiplier",
            "logits_scaling",
        ),
        **model,
    )


def granite_hybrid(config: Fields) -> ModelSpec:
    """Granite 4 models in which every layer is an attention layer."""
    refuse_states(config)
    if not config.names("layer_types"):
        raise config.broken("layer_types are missing, which says that no layer attends")
    if config.raw.get("num_local_experts") != 0:
        raise config.refused("num_local_experts", config.raw.get("num_local_experts"), "; 0 is")
    size = config.count("shared_intermediate_size")
    up = "shared_mlp.input_linear"
    dense = granite(
        Fields(config.raw | {"intermediate_size": size}, config.file),
        names=TensorNames(gate=up, up=up, down="shared_mlp.output_linear"),
    )
    if config.raw.get("position_embedding_type") == "rope":
        return dense
    layers = (
        replace(layer, attention=replace(layer.attention, rope=None)) for layer in dense.layers
    )
    return replace(dense, layers=tuple(layers))
