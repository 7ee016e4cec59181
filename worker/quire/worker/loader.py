"""The weights of one rank, read from safetensors: each rank reads its own shard and no more.

Split as in Megatron-LM (Shoeybi et al. 2019): Q, K, V, gate and up by their output, o and down by
their input, the LM head by the vocabulary. The embedding is whole on every rank: that costs
``vocab_size * hidden_size`` values and saves an all-reduce in every step; a tied LM head is a
view of it.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.decoder import DecoderLayer, DecoderWeights
from quire.worker.checkpoint import Checkpoint
from quire.worker.errors import CheckpointError
from quire.worker.model_config import LlamaConfig

SUM_PARTS = 4
"""Sums over heads or MLP channels have the same bits at any number of ranks that divides this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Which part of each tensor a rank holds."""

    rank: int = 0
    size: int = 1

    def range_of(self, total: int) -> tuple[int, int]:
        """This rank's part of ``total`` rows; parts differ by one row at most."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def num_parts(self, total: int) -> int:
        """Into how many parts this rank's ``total / size`` units are cut, to be summed alone.

        All ranks together have `SUM_PARTS` where that divides ``total``, whatever their number,
        so that the order of a sum over all does not depend on it.
        """
        parts = math.gcd(total, SUM_PARTS)
        return parts // self.size if parts % self.size == 0 else 1

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """This rank's KV heads: its share, or the one that its query heads read."""
        first = num_kv_heads * self.rank // self.size
        return first, first + max(1, num_kv_heads // self.size)


def load_weights(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    *,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
) -> DecoderWeights:
    """Reads the share of ``shard``, converted to ``dtype``, onto ``device``.

    ``backend`` packs each matrix as soon as it is read, so that there are two copies of one at
    most.

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
        return DecoderWeights(
            embedding_VC=embedding,
            layers=tuple(
                _load_layer(reader, f"model.layers.{layer}", config, shard, backend)
                for layer in range(config.num_layers)
            ),
            norm_C=reader.read("model.norm.weight", (hidden_size,)),
            lm_head=backend.pack_linear(lm_head),
        )


def _load_layer(
    reader: "_Reader", prefix: str, config: LlamaConfig, shard: Shard, backend: AttentionBackend
) -> DecoderLayer:
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
    return DecoderLayer(
        attention_norm_C=reader.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=backend.pack_linear(
            reader.read_fused(qkv, hidden),
            reader.read_fused_bias(qkv) if config.attention_bias else None,
        ),
        o=backend.pack_linear(
            reader.read(f"{attention}.o_proj.weight", (hidden, q_size), columns=q_range),
            reader.read(f"{attention}.o_proj.bias", (hidden,))
            if config.attention_bias and adds_bias
            else None,
            num_parts=shard.num_parts(config.num_heads),
        ),
        mlp_norm_C=reader.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=backend.pack_gated_linear(
            reader.read_fused(gate_up, hidden),
            reader.read_fused_bias(gate_up) if config.mlp_bias else None,
        ),
        down=backend.pack_linear(
            reader.read(f"{mlp}.down_proj.weight", (hidden, mlp_size), columns=mlp_range),
            reader.read(f"{mlp}.down_proj.bias", (hidden,))
            if config.mlp_bias and adds_bias
            else None,
            num_parts=shard.num_parts(mlp_size // 2),
        ),
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
