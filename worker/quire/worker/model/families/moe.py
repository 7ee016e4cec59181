"""Mixture-of-experts families, each of which is otherwise like a dense one."""

from dataclasses import replace

from quire.worker.model.families.decoder import (
    attention,
    decoder,
    experts,
    mlp,
    windows_by_type,
    with_windows,
)
from quire.worker.model.families.granite import granite, with_sinks_and_windows
from quire.worker.model.families.qwen import qwen2, qwen3
from quire.worker.model.families.rotary import rope, rope_section
from quire.worker.model.spec import Experts, Mlp, ModelSpec, Norm, TensorNames
from quire.worker.weights.fields import Fields

_GPT_OSS_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
"""The scaling of gpt-oss if the configuration has none."""


def mixtral(config: Fields) -> ModelSpec:
    window = None
    if config.raw.get("sliding_window") is not None:
        window = config.count("sliding_window")
    mixed = experts(config, size="intermediate_size", num="num_local_experts", renormalise=True)
    names = TensorNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts.{}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    )
    norm = Norm(eps=config.number("rms_norm_eps", default=1e-5))
    one = attention(config, window=window)
    return decoder(
        config,
        attention=one,
        mlp=mixed,
        norm=norm,
        ropes=(rope(config, head_size=one.key_size, theta=1_000_000.0),),
        names=names,
    )


def qwen2_moe(config: Fields) -> ModelSpec:
    shared = Mlp(size=config.count("shared_expert_intermediate_size"))
    mixed = experts(
        config, renormalise=config.flag("norm_topk_prob"), shared=shared, shared_gate=True
    )
    one = attention(config, qkv_bias=config.flag("qkv_bias", default=True))
    dense = replace(qwen2(config), names=TensorNames(shared="mlp.shared_expert."))
    layers = (
        replace(layer, attention=replace(one, window=layer.attention.window))
        for layer in dense.layers
    )
    return _sparse(config, replace(dense, layers=tuple(layers)), mixed)


def qwen3_moe(config: Fields) -> ModelSpec:
    num = "num_experts" if "num_experts" in config.raw else "num_local_experts"
    mixed = experts(config, num=num, renormalise=config.flag("norm_topk_prob"))
    return _sparse(config, qwen3(config), mixed)


def qwen3_vl_moe(config: Fields) -> ModelSpec:
    """Qwen3-VL's text decoder: routing weights are always normalised, and one tensor holds a matrix
    of all experts."""
    config = Fields(config.raw | {"norm_topk_prob": True}, config.file)
    up = "gate_up_proj"
    names = TensorNames(experts="mlp.experts.", expert_gate=up, expert_up=up)
    return replace(qwen3_moe(config), names=names)


def olmoe(config: Fields) -> ModelSpec:
    mixed = experts(config, size="intermediate_size", renormalise=config.flag("norm_topk_prob"))
    bias = config.flag("attention_bias")
    one = attention(config, qk_norm="whole", qkv_bias=bias, o_bias=bias)
    norm = Norm(eps=config.number("rms_norm_eps", default=1e-5))
    return decoder(config, attention=one, mlp=mixed, norm=norm)


def granite_moe(config: Fields) -> ModelSpec:
    dense = granite(config)
    mixed = experts(
        config, size="intermediate_size", num="num_local_experts", softmax_after_top_k=True
    )
    names = TensorNames(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe.",
        expert_gate="input_linear",
        expert_up="input_linear",
        expert_down="output_linear",
    )
    layers = tuple(replace(layer, mlp=mixed) for layer in dense.layers)
    return replace(dense, layers=layers, names=names)


def granite_moe_swa(config: Fields) -> ModelSpec:
    if config.raw.get("shared_intermediate_size"):
        raise config.refused(
            "shared_intermediate_size", config.raw["shared_intermediate_size"], "; 0 is"
        )
    up = "gate_up_proj"
    names = TensorNames(
        router="block_sparse_moe.router",
        experts="block_sparse_moe.experts.",
        expert_gate=up,
        expert_up=up,
    )
    return replace(with_sinks_and_windows(config, granite_moe(config)), names=names)


def gpt_oss(config: Fields) -> ModelSpec:
    mixed = experts(
        config,
        size="intermediate_size",
        num="num_local_experts",
        softmax_after_top_k=True,
        router_bias=True,
    )
    clamped = replace(
        mixed.mlp,
        activation="clamped_silu",
        bias=True,
        alpha=config.number("swiglu_alpha", default=1.702),
        limit=config.number("swiglu_limit", default=7.0),
    )
    bias = config.flag("attention_bias", default=True)
    one = attention(config, head_size=64, sinks=True, qkv_bias=bias, o_bias=bias)
    window = config.count("sliding_window", default=128)
    if not rope_section(config).raw:
        config = Fields(config.raw | {"rope_parameters": _GPT_OSS_ROPE}, config.file)
    return decoder(
        config,
        attention=with_windows(one, windows_by_type(config, window, every=2)),
        mlp=replace(mixed, mlp=clamped),
        norm=Norm(eps=config.number("rms_norm_eps", default=1e-5), wide=True),
        ropes=(rope(config, head_size=one.key_size, theta=150_000.0),),
        names=TensorNames(
            router="mlp.router",
            experts="mlp.experts.",
            experts_turned=True,
            expert_gate="gate_up_proj",
            expert_up="gate_up_proj",
        ),
    )


def glm4_moe(config: Fields) -> ModelSpec:
    size = config.count("moe_intermediate_size") * config.count("n_shared_experts")
    mixed = experts(
        config,
        num="n_routed_experts",
        score="sigmoid",
        correction_bias=True,
        groups=config.count("n_group", default=1),
        top_groups=config.count("topk_group", default=1),
        renormalise=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
        shared=Mlp(size=size),
    )
    one = attention(
        config,
        qkv_bias=config.flag("attention_bias"),
        qk_norm="head" if config.flag("use_qk_norm") else "none",
    )
    num_layers = config.count("num_hidden_layers")
    num_dense = 0
    if config.raw.get("first_k_dense_replace") != 0:
        num_dense = min(num_layers, config.count("first_k_dense_replace", default=1))
    return decoder(
        config,
        attention=one,
        mlp=(mlp(config),) * num_dense + (mixed,) * (num_layers - num_dense),
        norm=Norm(eps=config.number("rms_norm_eps", default=1e-5)),
        ropes=(rope(config, head_size=one.key_size, partial=0.5),),
        knows=("use_qk_norm",),
    )


def _sparse(config: Fields, dense: ModelSpec, mixed: Experts) -> ModelSpec:
    """Experts in every ``decoder_sparse_step``-th layer, except those of ``mlp_only_layers``."""
    step = config.count("decoder_sparse_step", default=1)
    only = config.raw.get("mlp_only_layers") or []
    layers = tuple(
        replace(layer, mlp=mixed) if (number + 1) % step == 0 and number not in only else layer
        for number, layer in enumerate(dense.layers)
    )
    return replace(dense, layers=layers)
