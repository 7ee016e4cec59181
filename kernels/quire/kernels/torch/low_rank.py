"""LoRA adapters (Hu et al. 2021) on linear layers, each applied to the rows of its own tokens.

    t = scale * (A x)      in float32
    product + B t          in float32; before the layer's bias if the layer has an unrounded
                           product, and always before its activation and any other sum

Ranks that split a layer's inputs compute a partial A x each. These are summed together with the
layer's own partial sums, in the same all-reduce, and scaled afterwards. A row's bits depend only on
its own values and its adapter.

This module has the list of layers that adapters may change, and the definition in plain PyTorch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.native.linear import NativeLinear
from quire.kernels.ops import (
    MAX_RANK,
    AdapterLayers,
    AdapterSlots,
    Embed,
    GatedLinear,
    Linear,
    LinearLayer,
    LowRank,
    MixExperts,
    PackedAdapter,
    Program,
)
from quire.kernels.torch.linear import PlainLinear, finished, unrounded

# T tokens   I, O a layer's inputs and outputs   R the ranks of an adapter's parts of a layer

_UNIT = 16
"""PyTorch may sum fewer rows or columns in other orders, so tensors are padded with zeros to it."""


class LowRankLayers(AdapterSlots, Protocol):
    """Adapters for a program that runs one operation at a time."""

    def group(self, slots_T: Tensor) -> Any:
        """Groups a step's tokens by their slots."""

    def shrink(self, name: str, x_TI: Tensor, groups: Any) -> Tensor | None:
        """A x of the layer ``name``, ``[T, R]`` float32, 0 where a token has no adapter for it;
        ``None`` where no token can have one."""

    def expand(self, name: str, product_TO: Tensor, ax_TR: Tensor, groups: Any) -> Tensor:
        """``product`` plus the adapters' updates; ``product`` may be overwritten."""


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of one step's tokens."""

    layers: LowRankLayers
    groups: Any

    @classmethod
    def of(cls, layers: LowRankLayers, slots_T: Tensor | None) -> "StepAdapters | None":
        """The adapters of the given slots; ``None`` if no token has one."""
        return None if slots_T is None else cls(layers, layers.group(slots_T))

    def shrink(self, name: str, x_TI: Tensor) -> Tensor | None:
        return self.layers.shrink(name, x_TI, self.groups)

    def expand(self, name: str, product_TO: Tensor, ax_TR: Tensor) -> Tensor:
        return self.layers.expand(name, product_TO, ax_TR, self.groups)


def multiply(layer: LinearLayer, name: str, x_TI: Tensor, adapters: StepAdapters | None) -> Tensor:
    """The output of the layer ``name`` for ``x``, with the tokens' adapters applied."""
    ax_TR = None if adapters is None else adapters.shrink(name, x_TI)
    if adapters is None or ax_TR is None:
        return layer(x_TI)
    product_TO = unrounded(layer, x_TI)
    sum_TO = adapters.expand(name, product_TO, ax_TR)
    out_TO = finished(layer, sum_TO, x_TI.dtype)
    if isinstance(layer, NativeLinear) and layer.weights.gated:
        # PyTorch's own activation has other last bits.
        is_changed_T1 = (sum_TO != product_TO).any(1, keepdim=True)
        out_TO = torch.where(is_changed_T1, out_TO, layer(x_TI))
    return out_TO


def adapted_layers(program: Program) -> dict[str, LinearLayer]:
    """The layers that adapters may change, by the names in `AdapterLayers`."""
    layers: dict[str, LinearLayer] = {}
    for op in program:
        if isinstance(op, Linear | GatedLinear):
            layers[op.name] = op.layer
        elif isinstance(op, MixExperts) and op.shared is not None:
            layers[f"{op.name}.shared.gate_up"] = op.shared.up
            layers[f"{op.name}.shared.down"] = op.shared.down
    return layers


def model_type(program: Program) -> Tensor:
    """A tensor of the model's type, on its device."""
    return next(op.weight_VC for op in program if isinstance(op, Embed))


def check_room(*, num_slots: int, max_rank: int) -> None:
    """Checks the settings of adapter slots.

    Raises:
        ValueError: A value is out of range.
    """
    if num_slots < 1 or not 1 <= max_rank <= MAX_RANK:
        raise ValueError(
            f"{num_slots=}, {max_rank=}: must be 1 or more, and a rank from 1 to {MAX_RANK}"
        )


def check_slot(slot: int, *, num_slots: int) -> None:
    """Checks a slot's number.

    Raises:
        ValueError: There is no such slot.
    """
    if not 0 <= slot < num_slots:
        raise ValueError(f"adapter slot {slot}: must be below {num_slots}")


def check_adapter(
    layers: AdapterLayers,
    adapted: Mapping[str, LinearLayer],
    dtype: torch.dtype,
    *,
    max_rank: int,
) -> None:
    """Checks an adapter against the layers that it changes.

    Raises:
        ValueError: As `AdapterSlots.pack`.
    """
    for name, parts in layers.items():
        if name not in adapted:
            raise ValueError(f"{name}: the model has no such layer for adapters")
        num_out, num_in = adapted[name].shape
        for part in parts:
            found = (part.a_RI.dtype, part.b_OR.dtype)
            if found != (dtype, dtype):
                raise ValueError(f"{name}: an adapter's A and B of {found}; must be of {dtype}")
            (rank, width), (height, ranks) = part.a_RI.shape, part.b_OR.shape
            if not 1 <= rank <= max_rank:
                raise ValueError(f"{name}: an adapter's rank {rank}; must be from 1 to {max_rank}")
            ends = part.first_row + height
            if (width, ranks) != (num_in, rank) or not 0 <= part.first_row <= ends <= num_out:
                raise ValueError(
                    f"{name}: an adapter's A of {(rank, width)} and B of {(height, ranks)} for the "
                    f"outputs from {part.first_row}; the layer has {num_in} inputs and {num_out} "
                    "outputs"
                )
            if not math.isfinite(part.scale):
                raise ValueError(f"{name}: an adapter's scale {part.scale}; must be finite")


@dataclass(frozen=True, slots=True)
class _Part:
    a: PlainLinear
    b: PlainLinear
    part: LowRank
    first: int
    """The index of its first rank among the ranks of all the adapter's parts of this layer."""

    @property
    def rank(self) -> int:
        """The part's rank, padding included."""
        return len(self.a.weight_OI)


@dataclass(frozen=True, slots=True)
class _Adapter(PackedAdapter):
    layers: Mapping[str, list[_Part]]


class PlainLowRank:
    """`LowRankLayers` in plain PyTorch, on a CPU."""

    def __init__(self, program: Program) -> None:
        self._program, self._adapted = program, adapted_layers(program)
        self._num_slots = self._max_rank = 0
        self._parts: dict[str, dict[int, list[_Part]]] = {}
        """Parts by layer and slot."""

    def open(self, *, num_slots: int, max_rank: int) -> None:
        check_room(num_slots=num_slots, max_rank=max_rank)
        self._num_slots, self._max_rank = num_slots, max_rank

    def pack(self, layers: AdapterLayers) -> PackedAdapter:
        dtype = model_type(self._program).dtype
        check_adapter(layers, self._adapted, dtype, max_rank=self._max_rank)
        adapter: dict[str, list[_Part]] = {}
        for name, parts in layers.items():
            adapter[name] = packed = []
            first = 0
            for part in parts:
                a_RI, b_OR = _filled_up(part.a_RI, dims=(0,)), _filled_up(part.b_OR, dims=(0, 1))
                packed.append(_Part(PlainLinear(a_RI), PlainLinear(b_OR), part, first))
                first += len(a_RI)
        return _Adapter(adapter)

    def set(self, slot: int, adapter: AdapterLayers | PackedAdapter | None) -> None:
        check_slot(slot, num_slots=self._num_slots)
        if not isinstance(adapter, PackedAdapter):
            adapter = self.pack(adapter or {})
        assert isinstance(adapter, _Adapter)
        for slots in self._parts.values():
            slots.pop(slot, None)
        for name, parts in adapter.layers.items():
            self._parts.setdefault(name, {})[slot] = parts

    def group(self, slots_T: Tensor) -> dict[int, Tensor]:
        return {slot: (slots_T == slot).nonzero()[:, 0] for slot in set(slots_T.tolist())}

    def shrink(self, name: str, x_TI: Tensor, groups: dict[int, Tensor]) -> Tensor | None:
        slots = self._parts.get(name)
        if not slots:
            return None
        num_ranks = max(each.first + each.rank for parts in slots.values() for each in parts)
        ax_TR = x_TI.new_zeros(len(x_TI), num_ranks, dtype=torch.float32)
        for slot, rows in groups.items():
            for each in slots.get(slot, ()):
                ax_TR[rows, each.first : each.first + each.rank] = each.a(x_TI[rows].float())
        return ax_TR

    def expand(
        self, name: str, product_TO: Tensor, ax_TR: Tensor, groups: dict[int, Tensor]
    ) -> Tensor:
        """Computes the result in float32."""
        out_TO = product_TO.float()
        out_TO = out_TO.clone() if out_TO is product_TO else out_TO
        for slot, rows in groups.items():
            for each in self._parts[name].get(slot, ()):
                t = ax_TR[rows, each.first : each.first + each.rank].float() * each.part.scale
                first, height = each.part.first_row, len(each.part.b_OR)
                out_TO[rows, first : first + height] += each.b(t)[:, :height]
        return out_TO


def _filled_up(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """The tensor in float32, padded with zeros to multiples of `_UNIT` in ``dims``."""
    missing = [-x.shape[dim] % _UNIT if dim in dims else 0 for dim in range(2)]
    return pad(x.float(), (0, missing[1], 0, missing[0]))
