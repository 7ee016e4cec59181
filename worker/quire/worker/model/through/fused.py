"""Fuses linear layers with the same input into one product, which saves calls per step."""

from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.backend import AttentionBackend
from quire.kernels.ops import LinearLayer

# T tokens   I, O a layer's input and output

_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def fuse(model: nn.Module, backend: AttentionBackend, device: torch.device) -> None:
    """Replaces Q, K and V of each attention, and MLPs that are ``down(silu(gate(x)) * up(x))``."""
    gated: dict[type, bool] = {}
    # Only names are kept, so that each matrix is freed as soon as it is packed.
    names = [name for name, module in model.named_modules() if type(module) is not nn.Linear]
    for name in names:
        module: Any = model.get_submodule(name)
        children: dict[str, Any] = dict(module.named_children())
        if _are_linear(children, _QKV):
            parts = [children[each] for each in _QKV]
            layer = backend.pack_linear(*_joined(parts, device))
            shared = _Shared(layer, [part.out_features for part in parts])
            for number, each in enumerate(_QKV):
                setattr(module, each, SharedProduct(shared, number))
        elif children.keys() == _MLP and _are_linear(children, ("gate_proj", "up_proj")):
            if type(module) not in gated:
                gated[type(module)] = _is_gated(module)
            if gated[type(module)]:
                pair = [children["gate_proj"], children["up_proj"]]
                layer = backend.pack_gated_linear(*_joined(pair, device))
                module.gate_proj, module.up_proj = Product(layer), nn.Identity()
                module.act_fn = nn.Identity()
                module.forward = _GatedMlp(module)


class Product(nn.Module):
    """A packed linear layer as a module, for inputs ``[..., I]``."""

    def __init__(self, layer: LinearLayer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out_TO = self._layer(x.flatten(0, -2))
        return out_TO.view(*x.shape[:-1], out_TO.shape[1])


class _Shared:
    """A fused product, with its last input and output."""

    def __init__(self, layer: LinearLayer, sizes: list[int]) -> None:
        self._layer = layer
        self._sizes = sizes
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, number: int) -> Tensor:
        if x is not self._x:
            out_TO = self._layer(x.flatten(0, -2)).view(*x.shape[:-1], sum(self._sizes))
            self._x, self._parts = x, torch.split(out_TO, self._sizes, dim=-1)
        part = self._parts[number]
        if number == len(self._sizes) - 1:
            self._x, self._parts = None, ()
        return part


class SharedProduct(nn.Module):
    """One layer's outputs of a fused product; the first layer that is called computes all."""

    def __init__(self, shared: _Shared, number: int) -> None:
        super().__init__()
        self._shared = shared
        self._number = number

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.part(x, self._number)


class _GatedMlp:
    """The forward pass of an MLP whose ``gate_proj`` computes everything before ``down_proj``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self._module.down_proj(self._module.gate_proj(x))  # type: ignore[no-any-return]


def _are_linear(children: dict[str, Any], names: tuple[str, ...]) -> bool:
    layers = [children.get(name) for name in names]
    if not all(type(layer) is nn.Linear for layer in layers):
        return False
    one: Any = layers[0]
    return all(
        layer.in_features == one.in_features
        and layer.weight.dtype == one.weight.dtype
        and (layer.bias is None) == (one.bias is None)
        for layer in layers
        if layer is not None
    )


def _joined(parts: list[Any], device: torch.device) -> tuple[Tensor, Tensor | None]:
    weight_OI = torch.cat([part.weight.detach() for part in parts]).to(device)
    if parts[0].bias is None:
        return weight_OI, None
    return weight_OI, torch.cat([part.bias.detach() for part in parts]).to(device)


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Whether the module computes ``down(silu(gate(x)) * up(x))``, by trial."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, module.gate_proj.in_features, generator=generator)
    x = x.to(module.gate_proj.weight.dtype)
    inner = nn.functional.silu(module.gate_proj(x)) * module.up_proj(x)
    expected, found = module.down_proj(inner).float(), module(x).float()
    scale = expected.abs().amax()
    return bool((found - expected).abs().amax() <= 0.01 * scale) and bool(scale > 0)
