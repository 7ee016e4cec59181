"""Batch-invariant replacements of those modules of transformers whose bits depend on the batch:
activations, RMS norms and tables of rotary embeddings."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.backend import AttentionBackend
from quire.kernels.reference import layers as reference

# T tokens   C channels   P positions


class RowActivation(nn.Module):
    """An activation, computed by a formula in float32.

    PyTorch's own activations compute the last few values of a tensor differently from the others.
    """

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self._formula(x.float()).to(x.dtype)


def row_activation(module: nn.Module) -> nn.Module | None:
    """The `RowActivation` of an activation module, or ``None`` for other modules."""
    formula = _FORMULAS.get(type(module).__name__)
    if type(module).__name__ == "GELUTanh" or getattr(module, "approximate", None) == "tanh":
        formula = gelu_tanh
    return None if formula is None else RowActivation(formula)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    # In place where possible: the first touch of new memory takes as long as the formula.
    return (0.5 * x).mul_((x * math.sqrt(0.5)).erf_().add_(1))


def gelu_tanh(x: Tensor) -> Tensor:
    return reference.gelu(x)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": silu,
    "SiLUActivation": silu,
    "GELU": gelu,
    "GELUActivation": gelu,
    "QuickGELUActivation": lambda x: x * sigmoid(1.702 * x),
    "Sigmoid": sigmoid,
}


class RowNorm(nn.Module):
    """An RMS norm by the backend's kernel."""

    def __init__(
        self, weight_C: nn.Parameter, *, eps: float, kind: str, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.weight = weight_C
        self.eps = eps
        self._backend = backend
        self._is_rms = kind == "rms"
        self._wide_C = None if self._is_rms else weight_C.detach().float() + (kind == "offset")

    def forward(self, x: Tensor) -> Tensor:
        x_TC = x.reshape(-1, x.shape[-1])
        if self._wide_C is None:
            out_TC, _ = self._backend.rms_norm(x_TC, self.weight, eps=self.eps)
        else:
            out_TC = self._backend.wide_norm(
                x_TC, self._wide_C, None, eps=self.eps, is_centred=False
            )
        return out_TC.view(x.shape)


def norm_kind(module: nn.Module) -> str | None:
    """The kind of RMS norm that a module computes, found by trial: "rms", "wide" or "offset" (wide,
    with weights stored minus one). ``None`` if it is none of these.

    The trial uses random values and weights in bfloat16, so that rounding distinguishes the kinds.
    """
    weight_C = getattr(module, "weight", None)
    eps = _eps(module)
    if "RMSNorm" not in type(module).__name__ or eps is None or weight_C is None:
        return None
    if weight_C.dim() != 1 or [*dict(module.named_parameters())] != ["weight"]:
        return None
    generator = torch.Generator().manual_seed(0)
    # Some values are so small that `eps` matters.
    scale = torch.tensor([[1.0], [eps**0.5]])
    x_TC = torch.randn(2, len(weight_C), generator=generator) * scale
    x_TC = x_TC.bfloat16()
    random_C = torch.randn(len(weight_C), generator=generator).bfloat16()
    trial: Any = copy.deepcopy(module).to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        trial.weight.copy_(random_C)
        found = trial(x_TC)
    wide_C = random_C.float()
    candidates = {
        "rms": reference.rms_norm(x_TC, random_C, eps=eps)[0],
        "wide": reference.wide_norm(x_TC, wide_C, None, eps=eps, is_centred=False),
        "offset": reference.wide_norm(x_TC, wide_C + 1, None, eps=eps, is_centred=False),
    }
    differences = {
        kind: (candidate.float() - found.float()).abs().mean().item()
        for kind, candidate in candidates.items()
    }
    best = min(differences, key=lambda kind: differences[kind])
    is_same = torch.allclose(candidates[best].float(), found.float(), rtol=0.01, atol=1e-3)
    return best if is_same else None


def row_norm(module: nn.Module, kind: str, backend: AttentionBackend) -> RowNorm:
    eps = _eps(module)
    assert eps is not None, "`norm_kind`"
    weight_C: Any = module.weight
    # In float32 both kinds round alike, and the kernel for "rms" is faster.
    kind = "rms" if kind == "wide" and weight_C.dtype == torch.float32 else kind
    return RowNorm(weight_C, eps=eps, kind=kind, backend=backend)


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


class RotaryTables(nn.Module):
    """The precomputed outputs of a rotary embedding module for positions below ``num_positions``.

    They are computed in one call, because some modules derive factors from a step's largest
    position.
    """

    def __init__(
        self, inner: Any, num_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._ask = inner.forward  # not a submodule, so it keeps its own device and type
        self._num_positions = num_positions
        self._x = torch.empty(1, 1, 1, dtype=dtype)
        self._device = device
        self._tables: dict[tuple[Any, ...], tuple[bool, list[Tensor]]] = {}

    def move(self, device: torch.device) -> None:
        """Moves the tables to ``device``."""
        self._device = device
        self._tables.clear()

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (position_ids.dim(), *args, *sorted(kwargs.items()))
        if key not in self._tables:
            self._tables[key] = self._compute(position_ids.dim(), args, kwargs)
        is_tuple, tables = self._tables[key]
        places_T = position_ids.reshape(-1, position_ids.shape[-1])[0]
        rows = [table.index_select(0, places_T)[None] for table in tables]
        return tuple(rows) if is_tuple else rows[0]

    def _compute(
        self, num_dims: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, list[Tensor]]:
        positions = torch.arange(self._num_positions)[None]
        if num_dims == 3:  # time, height and width: for text all three are the position
            positions = positions.expand(3, 1, -1)
        with torch.device("cpu"):
            made = self._ask(self._x, positions, *args, **kwargs)
        tables = list(made) if isinstance(made, tuple) else [made]
        for table in tables:
            if table.shape[:2] != (1, self._num_positions):
                raise ValueError(f"rotary embeddings of shape {list(table.shape)}")
        return isinstance(made, tuple), [table[0].to(self._device) for table in tables]
