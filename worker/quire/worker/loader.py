"""The weights of one rank, read from safetensors: each rank reads its own shard and no more.

Split as in Megatron-LM (Shoeybi et al. 2019): Q, K, V, gate and up by their output, o and down by
their input, the LM head by the vocabulary. The embedding is whole on every rank: that costs
``vocab_size * hidden_size`` values and saves an all-reduce in every step; a tied LM head is a
view of it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.worker.checkpoint import Checkpoint
from quire.worker.errors import CheckpointError
from quire.worker.model_config import LlamaConfig

# V vocabulary   C hidden size   H query heads   K KV heads   D head size   F MLP size
# Suffix "l": this rank's share


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Which part of each tensor a rank holds."""

    rank: int = 0
    size: int = 1

    def range_of(self, total: int) -> tuple[int, int]:
        """This rank's part of ``total`` rows; parts differ by one row at most."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """This rank's KV heads: its share, or the one that its query heads read."""
        first = num_kv_heads * self.rank // self.size
        return first, first + max(1, num_kv_heads // self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's share. A bias after a split input is on rank 0 only, to be added once."""

    attention_norm_C: Tensor
    qkv: Tensor
    """``[(Hl + 2 Kl) D, C]``: Q, then K, then V."""
    qkv_bias: Tensor | None
    o: Tensor
    """``[C, Hl D]``."""
    o_bias: Tensor | None
    mlp_norm_C: Tensor
    gate_up: Tensor
    """``[2 Fl, C]``: gate, then up."""
    gate_up_bias: Tensor | None
    down: Tensor
    """``[C, Fl]``."""
    down_bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaWeights:
    """A rank's share of a model."""

    embedding_VC: Tensor
    layers: tuple[LayerWeights, ...]
    norm_C: Tensor
    lm_head: Tensor
    """``[Vl, C]``."""


def load_weights(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    *,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
) -> LlamaWeights:
    """Reads the share of ``shard``, converted to ``dtype``, onto ``device``.

    Raises:
        CheckpointError: A tensor is missing, misshapen or cannot be read.
    """
    with _Reader.open(checkpoint, dtype=dtype, device=device) as reader:
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        embedding = reader.read("model.embed_tokens.weight", (vocab_size, hidden_size))
        vocab = shard.range_of(vocab_size)
        if config.tie_word_embeddings:
            lm_head = embedding[slice(*vocab)]
        else:
            lm_head = reader.read("lm_head.weight", (vocab_size, hidden_size), rows=vocab)
        return LlamaWeights(
            embedding_VC=embedding,
            layers=tuple(
                _load_layer(reader, f"model.layers.{layer}", config, shard)
                for layer in range(config.num_layers)
            ),
            norm_C=reader.read("model.norm.weight", (hidden_size,)),
            lm_head=lm_head,
        )


def _load_layer(reader: "_Reader", prefix: str, config: LlamaConfig, shard: Shard) -> LayerWeights:
    hidden, head = config.hidden_size, config.head_size
    first, last = shard.range_of(config.num_heads)
    q_range = (first * head, last * head)
    first, last = shard.kv_heads(config.num_kv_heads)
    kv_range = (first * head, last * head)
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
    mlp_size, mlp_range = config.intermediate_size, shard.range_of(config.intermediate_size)
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    qkv = [
        (f"{attention}.q_proj", q_size, q_range),
        (f"{attention}.k_proj", kv_size, kv_range),
        (f"{attention}.v_proj", kv_size, kv_range),
    ]
    gate_up = [(f"{mlp}.{name}_proj", mlp_size, mlp_range) for name in ("gate", "up")]
    adds_bias = shard.rank == 0
    return LayerWeights(
        attention_norm_C=reader.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.read_fused(qkv, hidden),
        qkv_bias=reader.read_fused_bias(qkv) if config.attention_bias else None,
        o=reader.read(f"{attention}.o_proj.weight", (hidden, q_size), columns=q_range),
        o_bias=reader.read(f"{attention}.o_proj.bias", (hidden,))
        if config.attention_bias and adds_bias
        else None,
        mlp_norm_C=reader.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.read_fused(gate_up, hidden),
        gate_up_bias=reader.read_fused_bias(gate_up) if config.mlp_bias else None,
        down=reader.read(f"{mlp}.down_proj.weight", (hidden, mlp_size), columns=mlp_range),
        down_bias=reader.read(f"{mlp}.down_proj.bias", (hidden,))
        if config.mlp_bias and adds_bias
        else None,
    )


_Part = tuple[str, int, tuple[int, int]]
"""A projection's name, its output size and the rows of that which a rank holds."""


class _Reader:
    """The open files of a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: dict[Path, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self._dtype = dtype
        self._device = device

    @classmethod
    @contextmanager
    def open(
        cls, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device
    ) -> "Iterator[_Reader]":
        with ExitStack() as stack:
            files = {}
            for file in checkpoint.files:
                try:
                    files[file] = stack.enter_context(safe_open(str(file), framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{file}: {error}") from error
            yield cls(checkpoint, files, dtype=dtype, device=device)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """A tensor that is ``shape`` in the file, or some rows or columns of it."""
        out_shape = list(shape)
        for axis, bounds in enumerate((rows, columns)):
            if bounds is not None:
                out_shape[axis] = bounds[1] - bounds[0]
        out = torch.empty(out_shape, dtype=self._dtype, device=self._device)
        self._read_into(out, name, shape, rows=rows, columns=columns)
        return out

    def read_fused(self, parts: list[_Part], in_size: int) -> Tensor:
        """The rows of several projections, one below the other."""
        out = torch.empty(
            sum(last - first for _, _, (first, last) in parts),
            in_size,
            dtype=self._dtype,
            device=self._device,
        )
        start = 0
        for name, out_size, (first, last) in parts:
            end = start + last - first
            self._read_into(
                out[start:end], f"{name}.weight", (out_size, in_size), rows=(first, last)
            )
            start = end
        return out

    def read_fused_bias(self, parts: list[_Part]) -> Tensor:
        return torch.cat(
            [self.read(f"{name}.bias", (size,), rows=rows) for name, size, rows in parts]
        )

    def _read_into(
        self,
        out: Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        info = self._checkpoint.find(name, shape)
        try:
            view = self._files[info.file].get_slice(name)
            if columns is not None:
                part = view[:, columns[0] : columns[1]]
            else:
                first, last = rows or (0, shape[0])
                part = view[first:last]
        except SafetensorError as error:
            raise CheckpointError(f"{info.file}: tensor {name!r}: {error}") from error
        if not part.is_floating_point():
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has type {info.dtype}; weights must be F32, BF16 or "
                "F16"
            )
        out.copy_(part)
