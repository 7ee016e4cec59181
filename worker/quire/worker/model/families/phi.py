"""Phi-3 and 4: fused projections in the checkpoint, and rotation of a part of each head."""

from quire.worker.model.families.decoder import attention, decoder, mlp
from quire.worker.model.families.rotary import rope, rope_section
from quire.worker.model.spec import ModelSpec, Norm, TensorNames
from quire.worker.weights.fields import Fields

QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
_OLD_LONGROPE = ("su", "yarn")
"""Names of LongRoPE in the first checkpoints."""


def phi3(config: Fields) -> ModelSpec:
    window = config.raw.get("sliding_window") and config.count("sliding_window")
    one = attention(config, window=window)
    section = rope_section(config)
    kind = section.raw.get("rope_type", section.raw.get("type"))
    if kind in _OLD_LONGROPE:
        section = Fields(section.raw | {"rope_type": "longrope"}, section.file)
    table = rope(config, head_size=one.key_size, section=section, partial=1.0)
    return decoder(
        config,
        attention=one,
        mlp=mlp(config),
        norm=Norm(eps=config.number("rms_norm_eps", default=1e-5)),
        ropes=(table,),
        names=TensorNames(q=QKV, k=QKV, v=QKV, gate=GATE_UP, up=GATE_UP),
    )
