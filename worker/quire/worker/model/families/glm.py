"""GLM-4, dense: interleaved rotation of half of each head, and norms after attention and MLP."""

from typing import Any

from quire.worker.model.families.decoder import attention, decoder, mlp
from quire.worker.model.families.phi import GATE_UP
from quire.worker.model.families.rotary import rope
from quire.worker.model.spec import ModelSpec, Norm, TensorNames
from quire.worker.weights.fields import Fields


def glm(config: Fields, **layer: Any) -> ModelSpec:
    one = attention(config, head_size=128, qkv_bias=config.flag("attention_bias", default=True))
    return decoder(
        config,
        attention=one,
        mlp=mlp(config),
        norm=Norm(eps=config.number("rms_norm_eps", default=1.5625e-7)),
        layer=layer,
        ropes=(rope(config, head_size=one.key_size, partial=0.5, interleaved=True),),
        names=TensorNames(
            gate=GATE_UP,
            up=GATE_UP,
            attention_out="post_self_attn_layernorm",
            mlp_out="post_mlp_layernorm",
        ),
    )


def glm4(config: Fields) -> ModelSpec:
    return glm(config, norms=("attention_in", "attention_out", "mlp_in", "mlp_out"))
