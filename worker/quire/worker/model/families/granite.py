"""Granite: a Llama with four multipliers. In Granite 4 the MLP is named like shared experts.
Granite SWA has windows, attention sinks, and layers without positions."""

from dataclasses import replace
from typing import Any

from quire.worker.model.families.decoder import attention, decoder, mlp, windows_by_type
from quire.worker.model.families.other import refuse_states
from quire.worker.model.families.rotary import rope, rope_section
from quire.worker.model.spec import ModelSpec, Norm, Rope, TensorNames
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


def granite_swa(config: Fields) -> ModelSpec:
    dense = granite(
        config,
        norm=Norm(eps=config.number("rms_norm_eps", default=1e-5)),
        tied=config.flag("tie_word_embeddings", default=True),
    )
    return with_sinks_and_windows(config, dense)


def with_sinks_and_windows(config: Fields, dense: ModelSpec) -> ModelSpec:
    """The model with attention sinks, the window of each layer, and its base of rotary embeddings.
    By default every fourth layer, from the first on, has no window, and all bases are equal."""
    kinds = config.names("layer_types") or [
        "sliding_attention" if number % 4 else "full_attention"
        for number in range(len(dense.layers))
    ]
    with_kinds = Fields(config.raw | {"layer_types": kinds}, config.file)
    windows = windows_by_type(with_kinds, config.count("sliding_window", default=128))
    size = dense.attentions[0].key_size
    bases = _bases(config, num_layers=len(dense.layers), head_size=size)
    different = sorted({base for base in bases if base is not None})
    ropes = [_rope(config, base, head_size=size) for base in different]
    layers = [
        replace(
            layer,
            attention=replace(
                layer.attention,
                sinks=True,
                window=window,
                rope=None if base is None else different.index(base),
            ),
        )
        for layer, window, base in zip(dense.layers, windows, bases, strict=True)
    ]
    return replace(dense, layers=tuple(layers), ropes=tuple(ropes) or dense.ropes)


def _bases(config: Fields, *, num_layers: int, head_size: int) -> list[float | None]:
    """The base of each layer's rotary embeddings; ``None`` for layers without positions."""
    listed = config.raw.get("layer_rope_theta")
    if listed is None:
        return [rope(config, head_size=head_size).theta] * num_layers
    is_list = isinstance(listed, list) and len(listed) == num_layers
    if not is_list or not all(type(each) in (int, float) and each >= 0 for each in listed):
        raise config.wrong("layer_rope_theta", listed, f"{num_layers} numbers of 0 or more")
    return [None if base == 0 else float(base) for base in listed]


def _rope(config: Fields, base: float, *, head_size: int) -> Rope:
    section = Fields(rope_section(config).raw | {"rope_theta": base}, config.file)
    return rope(config, head_size=head_size, section=section)
