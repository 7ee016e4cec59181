"""Loads one rank's rows and columns of an adapter's tensors, in the order of the model's layers."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.kernels.ops import AdapterLayers, LowRank
from quire.worker.model.rope import channel_order
from quire.worker.model.spec import Experts, Layer, ModelSpec
from quire.worker.parts.adapters.modules import Role
from quire.worker.parts.adapters.peft import WEIGHTS_NAME, Part, read_parts
from quire.worker.request.errors import AdapterError
from quire.worker.weights.loader import Shard

# O a module's outputs   I its inputs   R the adapter's rank

_Range = tuple[int, int]


def read_layers(
    folder: Path, spec: ModelSpec, *, shard: Shard, dtype: torch.dtype, max_rank: int
) -> AdapterLayers:
    """The updates of the adapter in ``folder`` to the linear layers of ``shard``, on the CPU.

    Raises:
        AdapterError: As `read_parts`, or a file cannot be read. Values are not checked.
    """
    parts = read_parts(folder, spec, max_rank=max_rank)
    file = folder / WEIGHTS_NAME
    found: dict[str, list[LowRank]] = defaultdict(list)
    try:
        with safe_open(str(file), framework="pt") as tensors:
            for part in parts:
                layer = found[part.module.layer]
                layer.append(_low_rank(part, spec, shard, tensors.get_tensor, dtype=dtype))
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file}: {error}") from error
    return {name: tuple(layers) for name, layers in found.items()}


def _low_rank(
    part: Part,
    spec: ModelSpec,
    shard: Shard,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
) -> LowRank:
    module, layer = part.module, spec.layers[part.module.number]
    a_RI, b_OR = read(part.a.name), read(part.b.name)
    if module.roles in (("o",), ("down",)):
        first, last = _share(layer, module.roles[0], shard)
        a_RI = a_RI[:, first:last]
        rows, first_row = [b_OR], 0
    else:
        rows, start = [], 0
        for role in module.roles:
            first, last = _share(layer, role, shard)
            rows.append(_ordered(spec, layer, role, b_OR[start + first : start + last]))
            start += _size(layer, role)
        first_row = _first_row(layer, module.roles[0], shard)
    return LowRank(
        a_RI=a_RI.to(dtype).contiguous(),
        b_OR=torch.cat(rows).to(dtype).contiguous(),
        first_row=first_row,
        scale=part.scale,
    )


def _size(layer: Layer, role: Role) -> int:
    """The projection's outputs over all ranks; for ``o`` and ``down`` its inputs."""
    attention, mlp = layer.attention, layer.mlp
    if role in ("q", "o"):
        return attention.num_heads * attention.key_size
    if role in ("k", "v"):
        return attention.num_kv_heads * attention.key_size
    inner = mlp.shared if isinstance(mlp, Experts) else mlp
    assert inner is not None, "no module of routed experts is read"
    return inner.size


def _share(layer: Layer, role: Role, shard: Shard) -> _Range:
    """The rank's range of the projection's outputs; for ``o`` and ``down`` of its inputs."""
    attention = layer.attention
    if role in ("gate", "up", "down"):
        return shard.range_of(_size(layer, role))
    if role in ("q", "o"):
        first, last = shard.range_of(attention.num_heads)
    else:
        first, last = shard.kv_heads(attention.num_kv_heads)
    return first * attention.key_size, last * attention.key_size


def _first_row(layer: Layer, role: Role, shard: Shard) -> int:
    """The first row of ``role`` among the rank's projections in one layer."""
    before: dict[Role, tuple[Role, ...]] = {"k": ("q",), "v": ("q", "k")}
    mlp = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
    if mlp is not None and mlp.gated:
        before["up"] = ("gate",)
    shares = [_share(layer, other, shard) for other in before.get(role, ())]
    return sum(last - first for first, last in shares)


def _ordered(spec: ModelSpec, layer: Layer, role: Role, rows_OR: Tensor) -> Tensor:
    """Reorders the channels of heads of Q and K as the program rotates them."""
    rope, head = layer.attention.rope, layer.attention.key_size
    if role not in ("q", "k"):
        return rows_OR
    order_D = channel_order(None if rope is None else spec.ropes[rope], head)
    if order_D is None:
        return rows_OR
    return rows_OR.view(-1, head, rows_OR.shape[1])[:, order_D].reshape(rows_OR.shape)
