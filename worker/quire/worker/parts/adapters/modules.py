"""Lists the modules of a model that a LoRA adapter may change, from the model's description.

Does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.worker.model.spec import Experts, Layer, Mlp, ModelSpec
from quire.worker.weights.checkpoint import TEXT_PREFIXES

Role = Literal["q", "k", "v", "o", "gate", "up", "down"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A linear module of the checkpoint: one of Quire's layers, or some rows of one."""

    number: int
    """The number of its decoder layer."""
    layer: str
    """Quire's name of the linear layer, such as "layers.3.qkv"."""
    roles: tuple[Role, ...]
    """The projections that it holds, concatenated by rows."""
    in_size: int
    out_size: int


def modules_of(spec: ModelSpec) -> dict[str, Module]:
    """The linear modules by their names in a text decoder, such as
    "model.layers.3.self_attn.q_proj"."""
    return {
        name: module
        for number, layer in enumerate(spec.layers)
        for name, module in _modules_of_layer(spec, number, layer)
    }


def find_module(modules: dict[str, Module], path: str) -> Module | None:
    """The module that an adapter names ``path``. The adapter may have been trained on a multimodal
    model with this decoder, or on the decoder without its head."""
    for prefix in TEXT_PREFIXES:
        if path.startswith(prefix):
            found = modules.get(f"model.{path.removeprefix(prefix)}")
            if found is not None:
                return found
    return modules.get(f"model.{path}")


def why_refused(spec: ModelSpec, path: str) -> str:
    """The reason why no module named ``path`` can be changed by an adapter."""
    names = spec.names
    if path.endswith((names.embedding.rpartition(".")[2], names.lm_head)):
        return "adapters of embeddings and of the LM head are not served; train without them"
    if any(isinstance(layer.mlp, Experts) for layer in spec.layers):
        if "experts" in path.split("."):
            return "adapters of routed experts are not served; train without them"
        if path.endswith((f".{names.router}", f".{names.shared_gate}")):
            return "adapters of routers are not served; train without them"
    kinds = sorted({name.split(".", 3)[3] for name in modules_of(spec)})
    return (
        f"the model has no linear module of that name in its {len(spec.layers)} layers; each has "
        f"{', '.join(kinds)}: is the adapter for this model?"
    )


def _modules_of_layer(spec: ModelSpec, number: int, layer: Layer) -> Iterator[tuple[str, Module]]:
    names, hidden, attention = spec.names, spec.hidden_size, layer.attention
    prefix, ours = f"{names.layer.format(number)}.", f"layers.{number}"
    q_size, kv_size = (
        attention.key_size * heads for heads in (attention.num_heads, attention.num_kv_heads)
    )
    qkv: list[tuple[str, Role, int]] = [
        (names.q, "q", q_size),
        (names.k, "k", kv_size),
        (names.v, "v", kv_size),
    ]
    yield from _stacked(number, f"{ours}.qkv", prefix, qkv, in_size=hidden)
    yield from _stacked(number, f"{ours}.o", prefix, [(names.o, "o", hidden)], in_size=q_size)
    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        own = (names.gate, names.up, names.down)
        yield from _mlp(number, ours, prefix, own, mlp, hidden=hidden)
    elif mlp.shared is not None:
        inner = [f"{names.shared}{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        shared = (inner[0], inner[1], inner[2])
        yield from _mlp(number, f"{ours}.shared", prefix, shared, mlp.shared, hidden=hidden)


def _mlp(
    number: int, ours: str, prefix: str, names: tuple[str, str, str], mlp: Mlp, *, hidden: int
) -> Iterator[tuple[str, Module]]:
    gate, up, down = names
    inputs: list[tuple[str, Role, int]] = [(gate, "gate", mlp.size)] if mlp.gated else []
    inputs.append((up, "up", mlp.size))
    layer = f"{ours}.{'gate_up' if mlp.gated else 'up'}"
    yield from _stacked(number, layer, prefix, inputs, in_size=hidden)
    outputs: list[tuple[str, Role, int]] = [(down, "down", hidden)]
    yield from _stacked(number, f"{ours}.down", prefix, outputs, in_size=mlp.size)


def _stacked(
    number: int, layer: str, prefix: str, parts: list[tuple[str, Role, int]], *, in_size: int
) -> Iterator[tuple[str, Module]]:
    """Merges parts with the same name into one module."""
    for name in dict.fromkeys(name for name, _, _ in parts):
        own = [(role, size) for other, role, size in parts if other == name]
        yield (
            f"{prefix}{name}",
            Module(
                number=number,
                layer=layer,
                roles=tuple(role for role, _ in own),
                in_size=in_size,
                out_size=sum(size for _, size in own),
            ),
        )
