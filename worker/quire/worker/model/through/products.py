"""Replaces the matrices of transformers' modules by packed ones, so that a row of a product has the
same bits in any batch.

A module keeps its own code, but its matrix is a `PackedWeight`. That supports ``linear`` and
``addmm`` and has a shape and a type; any other use of it raises.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.ops import LinearLayer
from quire.kernels.torch.experts import rows_by_expert

# T tokens   E experts   N pairs of a token and an expert   I, O a layer's input and output

_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.type_as)
_ASKS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "layout")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}


class NotALayer(Exception):
    """A module uses a matrix in a way that no packed layer supports."""


class PackedWeight(Tensor):
    """A placeholder, without values, for a matrix ``[O, I]``, or ``[I, O]`` if ``transposed``.

    ``layers`` are the packed layers by type of computation, with ``bias`` added. A module may use
    another type than its own (routers use float32). Without layers, as on the device "meta",
    results have no values either, and ``dtypes`` collects the types that were used.
    """

    layers: dict[torch.dtype, LinearLayer]
    dtypes: set[torch.dtype]
    bias: Tensor | None
    transposed: bool

    @staticmethod
    def of(
        matrix: Tensor,
        *,
        layers: dict[torch.dtype, LinearLayer],
        bias: Tensor | None,
        transposed: bool,
    ) -> "PackedWeight":
        empty = torch.empty((), dtype=matrix.dtype, device=matrix.device).expand(matrix.shape)
        weight: PackedWeight = Tensor._make_subclass(PackedWeight, empty)
        weight.layers, weight.dtypes = layers, set()
        weight.bias, weight.transposed = bias, transposed
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return _linear(*args, **kwargs)
        if func is torch.addmm and isinstance(args[2], cls) and args[2].transposed:
            return _linear(args[1], args[2], args[0])
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ASKS:
                return func(*args, **kwargs)
            if func in _CASTS and isinstance(args[0], cls):
                return args[0]._cast(func, args, kwargs)
        raise NotALayer(f"{getattr(func, '__name__', func)} of a matrix")

    def _cast(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "PackedWeight":
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        dtype = func(probe, *args[1:], **kwargs).dtype
        if dtype == self.dtype:
            return self
        matrix = torch.empty((), dtype=dtype, device=self.device).expand(self.shape)
        cast = PackedWeight.of(
            matrix, layers=self.layers, bias=self.bias, transposed=self.transposed
        )
        cast.dtypes = self.dtypes
        return cast


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, PackedWeight) or isinstance(x, PackedWeight):
        raise NotALayer("a matrix is the input of a product")
    with torch._C.DisableTorchFunctionSubclass():
        dtype, shape, is_meta = weight.dtype, weight.shape, weight.is_meta
    num_in, num_out = shape if weight.transposed else (shape[1], shape[0])
    weight.dtypes.add(dtype)
    if x.shape[-1] != num_in:
        raise NotALayer(f"{x.shape[-1]} channels for a matrix of {num_in}")
    if is_meta:
        return x.new_empty(*x.shape[:-1], num_out)
    out_TO = weight.layers[dtype](x.reshape(-1, num_in))
    if bias is not None and bias is not weight.bias:
        out_TO = out_TO + bias
    return out_TO.view(*x.shape[:-1], num_out)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers allows replacing the module's computation by `run_experts`."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


class ExpertLayers:
    """The packed layers of a module of experts, each from ``[I]`` to ``[O]``."""

    def __init__(self, up: list[LinearLayer], down: list[LinearLayer]) -> None:
        self.up = up
        self.down = down


def expert_matrices(module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Matrices ``[E, O, I]`` and biases ``[E, O]`` before the activation, then those after it.

    Raises:
        NotALayer: The module is of an unknown kind.
    """
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    if getattr(module, "has_post_expert_norm", False) or not all(
        getattr(module, name, None) is not None for name in names
    ):
        raise NotALayer(f"experts of kind {type(module).__name__}")
    found: list[Tensor | None] = []
    for name in names:
        matrix = getattr(module, name)
        found.append(matrix.transpose(1, 2) if module.is_transposed else matrix)
        found.append(getattr(module, f"{name}_bias") if module.has_bias else None)
    up, up_bias, down, down_bias = found
    assert up is not None
    assert down is not None
    return up, up_bias, down, down_bias


def run_experts(module: Any, hidden: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Sorts the tokens by expert and computes one packed product per expert. A token's results are
    added in the order in which its router listed the experts."""
    num_tokens, top_k = experts_Tk.shape
    if hidden.is_meta:
        return torch.empty_like(hidden)
    layers: ExpertLayers = module.quire_layers
    out_NC = hidden.new_zeros(num_tokens * top_k, hidden.shape[-1])
    # A router may send a token to no expert, which it encodes as the number of experts.
    for expert, rows_N in rows_by_expert(experts_Tk, len(layers.up)):
        inner = layers.up[expert](hidden[rows_N // top_k])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out_NC[rows_N] = layers.down[expert](inner)
    out_TkC = out_NC.view(num_tokens, top_k, -1) * weights_Tk[..., None]
    total_TC = out_TkC[:, 0]
    for place in range(1, top_k):
        total_TC = total_TC + out_TkC[:, place]
    return total_TC.to(hidden.dtype)
