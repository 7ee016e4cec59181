"""Which descriptions can be run: what no backend computes is refused by name. Knows no torch."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from quire.worker.api.errors import CheckpointError
from quire.worker.model.spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm, Rope

_RUNS: dict[type, set[str]] = {
    ModelSpec: {
        *("hidden_size", "layers", "ropes", "final_norm", "vocab_size", "max_positions", "tied"),
        *("dtype", "bos_token_id", "eos_token_ids", "names", "embedding_scale", "logit_scale"),
        *("logit_cap", "stored", "num_extra_layers", "is_text_part"),
    },
    Rope: {
        *("size", "theta", "kind", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_positions", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *("short_factors", "long_factors", "interleaved"),
    },
    Layer: {"attention", "mlp", "norm", "norms", "parallel", "residual_scale"},
    Attention: {
        *("num_heads", "num_kv_heads", "key_size", "value_size", "scale", "rope", "window"),
        *("qkv_bias", "o_bias", "qk_norm", "score_cap", "sinks"),
        *("position_scale", "position_period"),
    },
    Mlp: {"size", "activation", "gated", "bias", "alpha", "limit"},
    Experts: {
        *("mlp", "num_experts", "top_k", "score", "softmax_after_top_k", "correction_bias"),
        *("groups", "top_groups", "renormalise", "scale", "shared", "shared_gate", "router_bias"),
    },
    Norm: {"eps", "kind", "unit_offset", "wide", "bias"},
}
"""The fields that may have other values than their default. A field or a part that is not named
here is refused wherever it says something, and so are new ones."""
_ACTIVATIONS = (("silu", True), ("gelu_tanh", True), ("gelu_tanh", False))
"""And whether the MLP is gated."""


def check_runnable(spec: ModelSpec, source: object = "model") -> None:
    """Raises CheckpointError where the model has what no backend runs: place, field and value."""
    for what in _refusals(spec):
        raise CheckpointError(f"{source}: {what}")


def _refusals(spec: ModelSpec) -> Iterator[str]:
    yield from _unknown("", spec)
    yield from _unknown("final_norm.", spec.final_norm)
    if spec.stored and spec.stored.layout == "mxfp4" and not spec.names.experts_turned:
        yield "quantization_config.quant_method='mxfp4' is supported of gpt-oss' experts only"
    for number, rope in enumerate(spec.ropes):
        yield from _unknown(f"ropes.{number}.", rope)
    first = spec.layers[0].attention
    for number, layer in enumerate(spec.layers):
        where, attention = f"layers.{number}.", layer.attention
        yield from _unknown(where, layer)
        for name in ("attention", "mlp", "norm"):
            yield from _unknown(f"{where}{name}.", getattr(layer, name))
        yield from _refused_mlp(f"{where}mlp.", layer.mlp)
        if attention.value_size != attention.key_size:
            yield (
                f"{where}attention.value_size={attention.value_size} is not supported beside "
                f"key_size={attention.key_size}"
            )
        for name in ("num_heads", "num_kv_heads", "key_size"):
            value, expected = getattr(attention, name), getattr(first, name)
            if value != expected:
                yield (
                    f"{where}attention.{name}={value} is not supported beside {expected} in layer 0"
                )


def _refused_mlp(where: str, mlp: Mlp | Experts) -> Iterator[str]:
    if isinstance(mlp, Mlp):
        if (mlp.activation, mlp.gated) not in _ACTIVATIONS:
            yield f"{where}activation={mlp.activation!r} is not supported with gated={mlp.gated}"
        return
    for name in ("mlp", "shared"):
        each = getattr(mlp, name)
        if each is None:
            continue
        yield from _unknown(f"{where}{name}.", each)
        kind = (each.activation, each.gated, each.bias)
        is_clamped = name == "mlp" and kind == ("clamped_silu", True, True)
        if kind != ("silu", True, False) and not (is_clamped and each.limit is not None):
            yield (
                f"{where}{name} with activation={each.activation!r}, gated={each.gated} and "
                f"bias={each.bias} is not supported"
            )


def _unknown(where: str, part: Any) -> Iterator[str]:
    runs = _RUNS.get(type(part))
    if runs is None:
        yield f"{where.rstrip('.')}={type(part).__name__} is not supported"
        return
    for field in fields(part):
        value = getattr(part, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name not in runs and value != default:
            yield f"{where}{field.name}={value!r} is not supported"
