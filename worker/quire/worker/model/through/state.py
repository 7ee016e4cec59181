"""A checkpoint's tensors as transformers' loader takes them: each is read, and decoded where it is
quantised, when the loader asks for it."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from quire.kernels.grouped import decoded
from quire.worker.model.loader import Weights
from quire.worker.model.unpack import matrix_shape


class _Lazy:
    """Stands for a tensor until it is sliced."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]


def state_of(weights: Weights) -> dict[str, Any]:
    """By the names of a decoder of text."""
    modules = set(_stored_modules(weights))
    state: dict[str, Any] = {f"{each}.weight": _Lazy(_matrix(weights, each)) for each in modules}
    for name in weights.checkpoint.tensors:
        module, _, suffix = name.rpartition(".")
        if module not in modules or suffix == "bias":
            state[name] = _Lazy(lambda name=name: weights.read_plain(name))  # type: ignore[misc]
    return state


def _stored_modules(weights: Weights) -> Iterator[str]:
    if weights.stored is not None:
        for name in weights.checkpoint.tensors:
            module, _, suffix = name.rpartition(".")
            if suffix == weights.stored.scale and weights.is_stored(module):
                yield module


def _matrix(weights: Weights, module: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        assert weights.stored is not None
        shape = matrix_shape(weights.stored, lambda suffix: weights.raw(f"{module}.{suffix}"))
        matrix = decoded(weights.read_matrix(module, shape))
        weights.check()
        return matrix

    return read
