"""Presents a checkpoint's tensors to transformers' loader: each is read, and decoded if it is
quantised, when the loader accesses it."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from quire.kernels.grouped import decoded
from quire.worker.request.errors import CheckpointError
from quire.worker.weights.loader import Weights
from quire.worker.weights.stored import StoredFormat


class _Lazy:
    """A tensor that is read when it is sliced."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]


def state_of(weights: Weights) -> dict[str, Any]:
    """The weights by their names in a text decoder."""
    modules = dict(_stored_modules(weights))
    state: dict[str, Any] = {
        f"{module}.weight": _Lazy(_matrix(weights, module, stored))
        for module, stored in modules.items()
    }
    for name in weights.checkpoint.tensors:
        module, _, suffix = name.rpartition(".")
        if module not in modules or suffix == "bias":
            state[name] = _Lazy(lambda name=name: weights.read_plain(name))  # type: ignore[misc]
    return state


def _stored_modules(weights: Weights) -> Iterator[tuple[str, StoredFormat]]:
    """The modules that are quantised matrices, each with its format."""
    for name in weights.checkpoint.tensors:
        module, _, suffix = name.rpartition(".")
        stored = weights.format_of(module)
        if stored is not None and suffix == stored.scale:
            yield module, stored


def _matrix(weights: Weights, module: str, stored: StoredFormat) -> Callable[[], Tensor]:
    def read() -> Tensor:
        matrix = decoded(weights.read_matrix(module, _shape(weights, stored, module)))
        weights.check()
        return matrix

    return read


def _shape(weights: Weights, stored: StoredFormat, module: str) -> tuple[int, int]:
    """A matrix's shape: outputs and inputs."""
    if stored.layout == "packed":
        num_out, num_in = weights.raw(f"{module}.weight_shape").tolist()
        return num_out, num_in
    kind = "qweight" if stored.layout in ("gptq", "awq") else stored.codes
    info, per_int = weights.checkpoint.find(f"{module}.{kind}"), 32 // stored.bits
    if len(info.shape) != 2:
        raise CheckpointError(f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}")
    rows, columns = info.shape
    match stored.layout:
        case "gptq":
            return columns, rows * per_int
        case "awq":
            return columns * per_int, rows
        case "float4":
            return rows, columns * 2
    return rows, columns
