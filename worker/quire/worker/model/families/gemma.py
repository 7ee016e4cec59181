"""Gemma 2 and 3 (text): four norms per layer, GELU, a scaled embedding, windows; Gemma 2 has
soft caps."""

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
from quire.worker.model.spec import Attention, ModelSpec, Norm, TensorNames
from quire.worker.weights.fields import Fields

_KNOWN = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def gemma2(config: Fields) -> ModelSpec:
    layers = with_windows(_attention(config, cap=50.0), _windows(config, every=2))
    return _gemma(config, layers, logit_cap=_cap(config, "final_logit_softcapping", 30.0))


def gemma3(config: Fields) -> ModelSpec:
    one = _attention(config, cap=None, qk_norm="head")
    pattern = config.count(
        "_sliding_window_pattern", default=config.count("sliding_window_pattern", default=6)
    )
    layers = with_windows(one, _windows(config, every=pattern))
    return _gemma(
        config,
        tuple(replace(each, rope=0 if each.window is None else 1) for each in layers),
        logit_cap=_cap(config, "final_logit_softcapping", None),
        ropes=ropes_by_type(
            config,
            head_size=one.key_size,
            theta=1_000_000.0,
            sliding_theta=config.number("rope_local_base_freq", default=10_000.0),
        ),
    )


def _gemma(config: Fields, layers: tuple[Attention, ...], **model: Any) -> ModelSpec:
    eps = config.number("rms_norm_eps", default=1e-6)
    return decoder(
        config,
        attention=layers,
        mlp=mlp(config, field="hidden_activation", activation="gelu_pytorch_tanh"),
        norm=Norm(eps=eps, unit_offset=True, wide=True),
        layer={"norms": ("attention_in", "attention_out", "mlp_in", "mlp_out")},
        embedding_scale=config.count("hidden_size") ** 0.5,
        tied=config.flag("tie_word_embeddings", default=True),
        names=TensorNames(mlp_in="pre_feedforward_layernorm"),
        knows=_KNOWN,
        **model,
    )


def _attention(config: Fields, *, cap: float | None, **options: Any) -> Attention:
    bias = config.flag("attention_bias")
    return attention(
        config,
        head_size=256,
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        score_cap=_cap(config, "attn_logit_softcapping", cap),
        qkv_bias=bias,
        o_bias=bias,
        **options,
    )


def _windows(config: Fields, *, every: int) -> tuple[int | None, ...]:
    return windows_by_type(config, config.count("sliding_window", default=4096), every=every)


def _cap(config: Fields, name: str, default: float | None) -> float | None:
    """A soft cap; null means none."""
    if config.raw.get(name, default) is None:
        return None
    return config.number(name, default=default or 0.0)
