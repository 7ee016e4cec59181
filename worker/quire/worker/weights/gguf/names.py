"""Maps GGUF's tensor names to those of safetensors checkpoints, and records how llama.cpp's
converter changed the values, which is undone when they are read. Does not import torch.

Every tensor is either read, or part of the description, or refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import TensorInfo
from quire.worker.weights.gguf.container import Header, StoredTensor
from quire.worker.weights.stored import StoredFormat, StoredWeights

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = "mlp.experts.{}."
_MIXTRAL = "block_sparse_moe.experts.{}."
_OTHERS = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        **{
            f"ffn_{x}_exps": _MIXTRAL + w for x, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{x}_exps": f"{_EXPERTS}{x}_proj" for x in ("gate", "down", "up")},
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_DESCRIBE = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that are part of the description."""
_INTERLEAVED = ("llama", "smollm3")
"""Architectures whose Q and K rows have the two channels that are rotated together side by side."""
_LESS_ONE = ("gemma2", "gemma3")
"""Architectures whose norm weights were stored plus one."""
_MOST_EXPERTS = 1 << 12
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

_Q4_0, GROUP = 2, 32
"""The type whose blocks Quire's kernels read without decoding, and the inputs per block."""
_CODES, _SCALES = ".codes", ".scales"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTensor(TensorInfo):
    """A tensor in a GGUF file."""

    stored: StoredTensor
    interleaved_heads: int = 0
    """The number of heads, in each of which row 2 i is row i of a safetensors checkpoint, and row
    2 i + 1 the row half a head later. 0 if rows are in order."""
    offset: float = 0.0
    """The number to add to the stored values."""
    part: Literal["values", "codes", "scales"] = "values"
    """Whether to read decoded values or, from 4-bit blocks, the codes (0 to 15) or the scales."""
    expert: int = 0
    """The index among matrices that are stored as one tensor."""


def stored_in_blocks(header: Header) -> StoredWeights | None:
    """The linear layers whose codes and scales `placed` returns; ``None`` if there are none."""
    names = _names(header.architecture)
    modules = [
        name.format(expert).removesuffix(".weight")
        for stored in header.tensors.values()
        if (name := _renamed(stored.name, names)) and _stays_in_blocks(stored, name)
        for expert in range(_num_experts(stored, name))
    ]
    if not modules:
        return None
    stored = StoredFormat(layout="q4_0", bits=4, block=(1, GROUP), scale=_SCALES.removeprefix("."))
    return StoredWeights(formats=tuple((module, stored) for module in sorted(modules)))


def placed(header: Header, config: Mapping[str, Any]) -> dict[str, PlacedTensor]:
    """A model's tensors by their names in a safetensors checkpoint; for linear layers in 4-bit
    blocks, their codes and scales. ``config`` has the numbers of heads and layers.

    Raises:
        CheckpointError: A tensor is unknown.
    """
    architecture = header.architecture
    names = _names(architecture)
    tensors = {}
    for stored in header.tensors.values():
        if stored.name in _DESCRIBE:
            continue
        name = _renamed(stored.name, names, num_layers=config["num_hidden_layers"])
        if name is None:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name!r} is not known in a model of architecture "
                f"{architecture!r}; serve the model's safetensors files"
            )
        one = _place(stored, name, architecture, config)
        for expert in range(_num_experts(stored, name)):
            tensor, own_name = replace(one, expert=expert), name.format(expert)
            if not _stays_in_blocks(stored, name):
                tensors[own_name] = tensor
                continue
            module, (rows, columns) = own_name.removesuffix(".weight"), tensor.shape
            scales = replace(tensor, part="scales", shape=(rows, columns // GROUP))
            tensors[module + _CODES] = replace(tensor, part="codes", dtype="U8")
            tensors[module + _SCALES] = scales
    return tensors


def _num_experts(stored: StoredTensor, name: str) -> int:
    """The number of matrices that are concatenated in the tensor."""
    return stored.shape[0] if _is_of_experts(stored, name) else 1


def _is_of_experts(stored: StoredTensor, name: str) -> bool:
    return "{}" in name and len(stored.shape) == 3 and stored.shape[0] <= _MOST_EXPERTS


def _names(architecture: str) -> dict[str, str]:
    return _OF_LAYER | _OTHERS.get(architecture, {})


def _stays_in_blocks(stored: StoredTensor, name: str) -> bool:
    """Whether it is a linear layer's matrix in blocks that Quire's kernels read directly."""
    is_linear = name.endswith(("_proj.weight", "lm_head.weight")) and len(stored.shape) == 2
    return stored.type == _Q4_0 and (is_linear or _is_of_experts(stored, name))


def _renamed(name: str, of_layer: dict[str, str], *, num_layers: int = 1 << 24) -> str | None:
    stem, dot, kind = name.rpartition(".")
    if not dot or kind not in ("weight", "bias"):
        return None
    layer = _LAYER.fullmatch(stem)
    if layer is None:
        return f"{_WHOLE[stem]}.{kind}" if stem in _WHOLE else None
    renamed = of_layer.get(layer[2]) if int(layer[1]) < num_layers else None
    return renamed and f"model.layers.{layer[1]}.{renamed}.{kind}"


def _place(
    stored: StoredTensor, name: str, architecture: str, config: Mapping[str, Any]
) -> PlacedTensor:
    heads = 0
    if architecture in _INTERLEAVED and ".q_proj." in name:
        heads = config["num_attention_heads"]
    elif architecture in _INTERLEAVED and ".k_proj." in name:
        heads = config["num_key_value_heads"]
    is_less_one = architecture in _LESS_ONE and name.endswith("norm.weight")
    return PlacedTensor(
        file=stored.file,
        name=name,
        dtype="F32",
        shape=stored.shape[1:] if _is_of_experts(stored, name) else stored.shape,
        stored=stored,
        interleaved_heads=heads,
        offset=-1.0 if is_less_one else 0.0,
    )
