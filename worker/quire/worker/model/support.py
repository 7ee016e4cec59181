"""Refuses model descriptions that no backend can compute. Does not import torch."""

from collections.abc import Iterator

from quire.worker.model.spec import Experts, Mlp, ModelSpec
from quire.worker.request.errors import CheckpointError

_ACTIVATIONS = (("silu", True), ("gelu_tanh", True), ("gelu_tanh", False))
"""Supported pairs of an activation and whether the MLP is gated."""


def check_runnable(spec: ModelSpec, source: object = "model") -> None:
    """Raises CheckpointError if no backend can run the model: source, field and value."""
    for what in _refusals(spec):
        raise CheckpointError(f"{source}: {what}")


def _refusals(spec: ModelSpec) -> Iterator[str]:
    if spec.stored and spec.stored.has_mxfp4_experts and not spec.names.experts_turned:
        yield "quantization_config.quant_method='mxfp4' is supported of gpt-oss' experts only"
    first = spec.layers[0].attention
    for number, layer in enumerate(spec.layers):
        where, attention = f"layers.{number}.", layer.attention
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
        kind = (each.activation, each.gated, each.bias)
        is_clamped = name == "mlp" and kind == ("clamped_silu", True, True)
        if kind != ("silu", True, False) and not (is_clamped and each.limit is not None):
            yield (
                f"{where}{name} with activation={each.activation!r}, gated={each.gated} and "
                f"bias={each.bias} is not supported"
            )
