"""The steps after pooling, as in sentence-transformers, in float32. Does not import torch."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from quire.worker.model.pooling import Activation, Cut, Dense, LayerNorm, Normalize, Step
from quire.worker.request.arrays import Floats
from quire.worker.request.errors import CheckpointError
from quire.worker.request.vectors import normalized

# I inputs   O outputs   C channels

_EPS = 1e-5
"""The default of torch's LayerNorm, which sentence-transformers uses."""


def make_step(step: Step) -> Callable[[Floats], Floats]:
    """The function that computes ``step``. Raises CheckpointError: its file cannot be read, or has
    other tensors than the step."""
    match step:
        case Dense():
            return _dense(step)
        case LayerNorm():
            return _layer_norm(step)
        case Normalize():
            return normalized
        case Cut():
            return lambda vector_C: vector_C[: step.size]


def _dense(dense: Dense) -> Callable[[Floats], Floats]:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.num_out, dense.num_in)}
    if dense.has_bias:
        shapes["linear.bias"] = (dense.num_out,)
    is_projected = dense.has_residual and dense.num_in != dense.num_out
    if is_projected:
        shapes["residual.weight"] = (dense.num_out, dense.num_in)
    tensors = _tensors(dense.file, shapes)
    weight_OI = tensors["linear.weight"]
    bias_O = tensors.get("linear.bias", np.zeros(dense.num_out, np.float32))

    def apply(vector_I: Floats) -> Floats:
        out_O = _activated(weight_OI @ vector_I + bias_O, dense.activation)
        if not dense.has_residual:
            return out_O
        return out_O + (tensors["residual.weight"] @ vector_I if is_projected else vector_I)

    return apply


def _layer_norm(norm: LayerNorm) -> Callable[[Floats], Floats]:
    tensors = _tensors(norm.file, {"norm.weight": (norm.size,), "norm.bias": (norm.size,)})

    def apply(vector_C: Floats) -> Floats:
        wide_C = vector_C.astype(np.float64)
        scaled_C = (wide_C - wide_C.mean()) / np.sqrt(wide_C.var() + _EPS)
        made: Floats = (scaled_C * tensors["norm.weight"] + tensors["norm.bias"]).astype(np.float32)
        return made

    return apply


def _activated(out_O: Floats, activation: Activation) -> Floats:
    made: npt.NDArray[np.floating[Any]] = out_O
    match activation:
        case "Tanh":
            made = np.tanh(out_O)
        case "ReLU":
            made = np.maximum(out_O, 0)
        case "Sigmoid" | "SiLU":
            made = (1 + np.tanh(out_O / 2)) / 2 * (out_O if activation == "SiLU" else 1)
        case "GELU":
            shares_O = [(1 + math.erf(value / math.sqrt(2))) / 2 for value in out_O.tolist()]
            made = out_O * np.array(shares_O, np.float32)
        case "Identity":
            pass
    return made.astype(np.float32)


def _tensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """The tensors of ``file``, which must be those of ``shapes``, in float32."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: only safetensors files are read")
    try:
        tensors = dict(deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    found = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    if found != shapes:
        raise CheckpointError(
            f"{file}: has the tensors {_shown(found)}, and config.json beside it asks for "
            f"{_shown(shapes)}"
        )
    for name, tensor in tensors.items():
        if tensor["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name!r} has type {tensor['dtype']}; it must be one of "
                f"{', '.join(_DTYPES)}"
            )
    return {
        name: _floats(tensor["dtype"], tensor["data"]).reshape(found[name])
        for name, tensor in tensors.items()
    }


_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""Types of weights, and NumPy's types of as many bytes. It has no BF16: the upper half of F32."""


def _floats(dtype: str, data: bytes) -> Floats:
    stored = np.frombuffer(data, _DTYPES[dtype])
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _shown(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
