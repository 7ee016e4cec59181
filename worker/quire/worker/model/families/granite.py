"""Granite: a Llama with four multipliers."""

from quire.worker.model.families.decoder import attention, decoder, mlp
from quire.worker.model.fields import Fields
from quire.worker.model.spec import ModelSpec


def granite(config: Fields) -> ModelSpec:
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
    )
