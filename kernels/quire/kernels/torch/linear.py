"""Linear layers in PyTorch, for backends and types without a faster kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.native.linear import NativeLinear
from quire.kernels.ops import Clamped, GateActivation, LinearLayer
from quire.kernels.reference import layers as reference

# T tokens   I, O a layer's input and output   P parts of the input

_ROW_MULTIPLE = {torch.float32: 16, torch.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A linear layer by PyTorch's own product.

    On CPUs, PyTorch sums products of few rows in another order: up to three or ten rows in float32,
    depending on the CPU, and one row in bfloat16. So rows are padded to a multiple.
    `quire.kernels.torch.cpu` makes MKL use the same order for any number of threads.
    """

    weight_OI: Tensor
    bias_O: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.weight_OI.shape
        return num_out, num_in

    def __call__(self, x_TI: Tensor) -> Tensor:
        rows = len(x_TI)
        missing = -rows % _ROW_MULTIPLE.get(x_TI.dtype, 1)
        if missing and x_TI.device.type == "cpu":
            x_TI = functional.pad(x_TI, (0, 0, 0, missing))
        return functional.linear(x_TI, self.weight_OI, self.bias_O)[:rows]


def unrounded(layer: LinearLayer, x_TI: Tensor) -> Tensor:
    """The product, in float32 and unrounded if the layer supports that: if the sum over ranks is
    rounded only once, its bits are those of a single rank. A gated layer's product is gates, then
    ups."""
    if isinstance(layer, PlainGatedLinear):
        return layer.gate_up(x_TI)
    return layer.unrounded(x_TI) if isinstance(layer, NativeLinear) else layer(x_TI)


def finished(layer: LinearLayer, product_TO: Tensor, dtype: torch.dtype) -> Tensor:
    """The layer's output from an `unrounded` product, to which a caller may have added."""
    product_TO = product_TO.to(dtype)
    if isinstance(layer, PlainGatedLinear):
        return layer.activate(product_TO)
    if isinstance(layer, NativeLinear) and layer.weights.gated:
        return PlainGatedLinear(layer, layer.activation).activate(product_TO)
    return product_TO


def wide_linear(weight_OI: Tensor, bias_O: Tensor | None) -> PlainLinear:
    """A layer that computes in float32."""
    return PlainLinear(weight_OI.float(), None if bias_O is None else bias_O.float())


@dataclass(frozen=True, slots=True)
class PlainInt8Linear:
    """A layer quantised to int8, by exact integer sums; slow."""

    weight_OPI: Tensor
    scale_OP: Tensor
    bias_O: Tensor | None = None

    @classmethod
    def of(
        cls, weight_OI: Tensor, bias_O: Tensor | None = None, *, num_parts: int = 1
    ) -> "PlainInt8Linear":
        """Quantises ``weight``; ``num_parts`` as in `quire.kernels.reference.layers.quantize`."""
        return cls(*reference.quantize(weight_OI, num_parts=num_parts), bias_O)

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_parts, part = self.weight_OPI.shape
        return num_out, num_parts * part

    def __call__(self, x_TI: Tensor) -> Tensor:
        out_TO = reference.int8_linear(x_TI, self.weight_OPI, self.scale_OP)
        return (out_TO if self.bias_O is None else out_TO + self.bias_O).to(x_TI.dtype)


@dataclass(frozen=True, slots=True)
class PlainGatedLinear:
    """A gated layer with a `GateActivation`; the inner layer's output is gate, then up."""

    gate_up: LinearLayer
    activation: GateActivation = "silu"

    @property
    def shape(self) -> tuple[int, int]:
        return self.gate_up.shape

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.activate(self.gate_up(x_TI))

    def activate(self, gate_up_TG: Tensor) -> Tensor:
        activation = self.activation
        if isinstance(activation, Clamped):
            alpha, limit = activation.alpha, activation.limit
            return reference.clamped_silu_and_mul(gate_up_TG, alpha=alpha, limit=limit)
        if activation == "silu":
            return reference.silu_and_mul(gate_up_TG)
        return reference.gelu_and_mul(gate_up_TG)
