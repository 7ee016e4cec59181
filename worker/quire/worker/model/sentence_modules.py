"""Reads the modules behind the Transformer of a sentence-transformers folder: each one's settings,
and where its weights are. Imports neither torch nor NumPy."""

from pathlib import Path
from typing import Any, get_args

from quire.worker.model.pooling import Activation, Dense, LayerNorm, Normalize, PoolingMode
from quire.worker.weights.checkpoint import read_json
from quire.worker.weights.fields import Fields

_MODES: dict[str, PoolingMode] = {
    **{"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt"},
    **{"weightedmean": "weighted_mean", "lasttoken": "last"},
}
_FLAGS = {
    **{"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"},
    **{"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean"},
    "lasttoken": "lasttoken",
}
"""Pooling modes of older files, by the suffix of the field ``pooling_mode_…``, in the order in
which sentence-transformers joins their vectors."""
_EMBEDDING, _SCORES = "sentence_embedding", "scores"


def read_modes(file: Path) -> tuple[PoolingMode, ...]:
    """The pooling's modes. The newer field counts if older ones are there too."""
    config = Fields(read_json(file), file)
    flags = {f"pooling_mode_{suffix}": mode for suffix, mode in _FLAGS.items()}
    config.only(
        *("embedding_dimension", "word_embedding_dimension", "include_prompt", "pooling_mode"),
        *flags,
    )
    written: Any = config.raw.get("pooling_mode")
    if written is None:
        written = [mode for flag, mode in flags.items() if config.flag(flag)] or ["mean"]
    listed = written if isinstance(written, list) else [written]
    if not listed or not all(isinstance(each, str) and each in _MODES for each in listed):
        raise config.refused("pooling_mode", written, f"; only {', '.join(_MODES)} are")
    modes = tuple(_MODES[each] for each in listed)
    if not config.flag("include_prompt", default=True) and modes != ("last",):
        raise config.refused(
            "include_prompt", False, ": a prompt is part of the text here, and would be pooled"
        )
    return modes


def read_dense(folder: Path, *, is_head: bool) -> Dense:
    """The layer in ``folder``. ``is_head``: its one output is a pair's logit."""
    settings = folder / "config.json"
    config = Fields(read_json(settings), settings)
    config.only(
        *("in_features", "out_features", "bias", "activation_function", "use_residual"),
        *("module_input_name", "module_output_name"),
    )
    function = config.raw.get("activation_function", "torch.nn.modules.activation.Tanh")
    output = _SCORES if is_head else _EMBEDDING
    config.choice("module_input_name", {_EMBEDDING: ""}, default=_EMBEDDING)
    config.choice("module_output_name", {output: ""}, default=_EMBEDDING)
    num_out = config.count("out_features")
    if is_head and num_out != 1:
        raise config.broken(f"{num_out} scores: a model that scores pairs has one")
    weights = folder / "model.safetensors"
    activation: Activation = _function(config, "activation_function", function)
    return Dense(
        file=weights,
        num_in=config.count("in_features"),
        num_out=num_out,
        activation=activation,
        has_bias=config.flag("bias", default=True),
        has_residual=config.flag("use_residual"),
    )


def read_layer_norm(folder: Path) -> LayerNorm:
    settings, weights = folder / "config.json", folder / "model.safetensors"
    config = Fields(read_json(settings), settings)
    config.only("dimension")
    return LayerNorm(file=weights, size=config.count("dimension"))


def read_normalize(file: Path) -> Normalize:
    config = Fields(read_json(file) if file.is_file() else {}, file)
    config.only("module_input_name", "module_output_name")
    for name in config.raw:
        config.choice(name, {_EMBEDDING: ""}, default=_EMBEDDING)
    return Normalize()


def _function(config: Fields, field: str, written: object) -> Any:
    """The short name of a function of torch, one of `Activation`."""
    name = str(written).rpartition(".")[2]
    if not str(written).startswith("torch.nn.") or name not in get_args(Activation):
        known = " or ".join(get_args(Activation))
        raise config.refused(field, written, f"; only torch.nn's {known} is")
    return name
