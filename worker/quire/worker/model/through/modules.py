"""Replaces modules of a transformers model: on the device "meta" for the dry run, then, with
weights, by the layers that a backend packed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from quire.kernels.backend import AttentionBackend
from quire.kernels.ops import LinearLayer
from quire.worker.model.through import rowwise
from quire.worker.model.through.fused import Product, fuse
from quire.worker.model.through.products import (
    ExpertLayers,
    NotALayer,
    PackedWeight,
    expert_matrices,
    is_experts,
    run_experts,
)
from quire.worker.request.errors import CheckpointError

_EXPERTS = "quire"


@dataclass(slots=True)
class Plan:
    """The modules to replace, by name."""

    norms: dict[str, str] = field(default_factory=dict)
    """The kind of each RMS norm."""
    tables: dict[str, rowwise.RotaryTables] = field(default_factory=dict)
    weights: dict[str, PackedWeight] = field(default_factory=dict)
    """Matrices, by the names of parameters, each with the types that it was used in."""
    by_rows: list[str] = field(default_factory=list)
    """Modules that call functions which need `_RowFunctions`."""


def install_for_dry_run(
    model: Any, *, num_positions: int, dtype: torch.dtype, is_strict: bool
) -> Plan:
    """Replaces modules of ``model``, which is on the device "meta", and returns which.

    Raises:
        NotALayer: ``is_strict``, and there are matrices in modules of an unknown kind.
    """
    plan = Plan()
    for name, module in list(model.named_modules()):
        if rowwise.is_rotary(module):
            # On the CPU, with values, from which the tables are computed.
            inner: Any = type(module)(config=module.config)
            plan.tables[name] = rowwise.RotaryTables(
                inner, num_positions, dtype=dtype, device=torch.device("cpu")
            )
            _replace(model, name, _OnMeta(plan.tables[name]))
        kind = rowwise.norm_kind(module)
        if kind is not None:
            plan.norms[name] = kind
            _replace(model, name, nn.Identity())
    _replace_activations(model)
    for name, module, attribute, matrix in list(_matrices(model)):
        plan.weights[name] = PackedWeight.of(
            matrix, layers={}, bias=None, transposed=isinstance(module, Conv1D)
        )
        _set(module, attribute, plan.weights[name])
    if any(is_experts(module) for module in model.modules()):
        _use_experts(model)
    if is_strict:
        for name, module, parameter in _parameters(model):
            if parameter.squeeze().dim() > 1 and not isinstance(module, nn.Embedding):
                if is_experts(module):
                    expert_matrices(module)
                    continue
                raise NotALayer(
                    f"with {name} {list(parameter.shape)}, which is neither of a linear layer nor "
                    "of experts in a known form"
                )
    return plan


def install(model: Any, plan: Plan, backend: AttentionBackend, device: torch.device) -> None:
    """Replaces the modules of ``plan`` in ``model``, which has its weights, and moves it to
    ``device``. At most one matrix is in memory twice.

    Raises:
        CheckpointError: A weight is NaN or infinite.
    """
    for name, _, parameter in _parameters(model):
        if not bool(parameter.detach().sum(dtype=torch.float32).isfinite()) and not bool(
            parameter.isfinite().all()
        ):
            raise CheckpointError(
                f"{model.name_or_path}: tensor {name!r} has values that are NaN or infinite as "
                f"{parameter.dtype}: the file is damaged, or its training diverged"
            )
    fuse(model, backend, device)
    lm_head = model.get_output_embeddings()
    # Only names are kept, so that each matrix is freed as soon as it is packed.
    for name in [name for name, *_ in _matrices(model)]:
        parent, _, attribute = name.rpartition(".")
        module = model.get_submodule(parent)
        pack = partial(backend.pack_linear, is_lm_head=module is lm_head)
        weight = _packed(module, attribute, plan.weights[name].dtypes, pack, device)
        if type(module) is nn.Linear and weight.dtype in weight.layers:
            layer = Product(weight.layers[weight.dtype])
            layer.weight = weight  # Some modules read its type.
            _replace(model, parent, layer)
    for module in model.modules():
        if is_experts(module):
            _pack_experts(module, backend, device)
    model.to(device)
    for name, kind in plan.norms.items():
        module = model.get_submodule(name)
        _replace(model, name, rowwise.row_norm(module, kind, backend))
    for name, tables in plan.tables.items():
        tables.move(device)
        _replace(model, name, tables)
    _replace_activations(model)
    for name in plan.by_rows:
        module = model.get_submodule(name)
        module.forward = _by_rows(module.forward)
    if any(is_experts(module) for module in model.modules()):
        _use_experts(model)


class _OnMeta(nn.Module):
    """Rotary tables without values, for the dry run."""

    def __init__(self, tables: rowwise.RotaryTables) -> None:
        super().__init__()
        self._tables = [tables]

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = torch.zeros(position_ids.shape, dtype=torch.long, device="cpu")
        made = self._tables[0](x, positions, *args, **kwargs)
        return (
            tuple(each.to("meta") for each in made) if isinstance(made, tuple) else made.to("meta")
        )


def replaced_part(part: object) -> str:
    """What ``part`` replaces in a dry run; empty if it is transformers' own."""
    known: dict[type, str] = {
        _OnMeta: "its rotary embeddings",
        nn.Identity: "a norm",
        PackedWeight: "a matrix",
    }
    is_ours = type(part).__module__.startswith("quire.")
    return known.get(type(part), "a module" if is_ours else "")


class _RowFunctions(TorchFunctionMode):
    """Replaces functions whose bits depend on a value's place in the tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        formula = _FORMULAS.get(func)
        if func is functional.gelu and (kwargs or {}).get("approximate") == "tanh":
            formula = rowwise.gelu_tanh
        if formula is None:
            return func(*args, **(kwargs or {}))
        return formula(args[0].float()).to(args[0].dtype)


_FORMULAS: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.sigmoid: rowwise.sigmoid,
    Tensor.sigmoid: rowwise.sigmoid,
    functional.sigmoid: rowwise.sigmoid,
    functional.silu: rowwise.silu,
    functional.gelu: rowwise.gelu,
}


def _by_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    def by_rows(*args: Any, **kwargs: Any) -> Any:
        with _RowFunctions():
            return forward(*args, **kwargs)

    return by_rows


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}".lstrip("."), module, parameter


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Parameters used in matrix products: all matrices except those of embeddings."""
    for name, module, parameter in _parameters(model):
        is_layer = isinstance(module, nn.Linear) or min(parameter.shape, default=0) > 1
        is_matrix = parameter.dim() == 2 and is_layer
        if is_matrix and not isinstance(module, nn.Embedding) and not is_experts(module):
            yield name, module, name.rpartition(".")[2], parameter


def _set(module: nn.Module, attribute: str, weight: PackedWeight) -> None:
    del module._parameters[attribute]
    object.__setattr__(module, attribute, weight)


def _packed(
    module: Any,
    attribute: str,
    dtypes: set[torch.dtype],
    pack: Callable[..., LinearLayer],
    device: torch.device,
) -> PackedWeight:
    """Packs a matrix of ``module`` and replaces it by the result."""
    matrix: Tensor = getattr(module, attribute).detach()
    transposed = isinstance(module, Conv1D)
    bias = getattr(module, "bias", None)
    if not isinstance(bias, nn.Parameter) or attribute != "weight":
        bias = None
    if bias is not None:
        bias = bias.detach().to(device)
        del module._parameters["bias"]
        module.bias = bias
    matrix_OI = matrix.T.contiguous() if transposed else matrix
    layers = {
        dtype: pack(matrix_OI.to(device, dtype), None if bias is None else bias.to(dtype))
        for dtype in dtypes
    }
    weight = PackedWeight.of(
        matrix.new_empty(()).to(device).expand(matrix.shape),
        layers=layers,
        bias=bias,
        transposed=transposed,
    )
    _set(module, attribute, weight)
    return weight


def _pack_experts(module: Any, backend: AttentionBackend, device: torch.device) -> None:
    up, up_bias, down, down_bias = expert_matrices(module)

    def pack(matrices: Tensor, biases: Tensor | None) -> list[Any]:
        return [
            backend.pack_linear(
                matrix.detach().contiguous().to(device),
                None if biases is None else biases[expert].detach().to(device),
            )
            for expert, matrix in enumerate(matrices)
        ]

    layers = ExpertLayers(pack(up, up_bias), pack(down, down_bias))
    module._parameters.clear()
    module.quire_layers = layers


def _use_experts(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, run_experts)
    model.set_experts_implementation(_EXPERTS)


def _replace_activations(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        same = rowwise.row_activation(module)
        if same is not None:
            _replace(model, name, same)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
