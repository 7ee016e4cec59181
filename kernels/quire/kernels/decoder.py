"""A Llama decoder's parts, as a backend sees them: linear layers, weights, the step's input.

A backend makes each linear layer in its own way (`AttentionBackend.pack_linear`), and may run the
whole forward pass in one call (`AttentionBackend.decoder`); otherwise the model calls it layer by
layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels import reference
from quire.kernels.shared_prefix import SharedSplits

# T tokens of the step, packed   B sequences   M blocks of the longest   S rows that are sampled
# G of these that are greedy
# C hidden size   H query heads   K KV heads (both: of this rank)   D head size   R = D / 2
# F MLP channels   V vocabulary   P positions   I, O a linear layer's input and output

KvCache = list[tuple[Tensor, Tensor]]
"""K and V of each layer: ``[num_blocks, block_size, K, D]``, in int8 with `SCALE_BYTES` more behind
the D. What stands where within a block is the backend's affair."""

_ROW_MULTIPLE = 4


class Linear(Protocol):
    """A linear layer: ``[T, I]`` to ``[T, O]``. A row's bits do not depend on the other rows."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A `Linear` of PyTorch's.

    On CPUs MKL's float32 product takes another order of summation for one to three rows than for
    more, and also for such a remainder of a thread's rows; so rows are filled up to a multiple
    of four.
    """

    weight_OI: Tensor
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        rows = len(x_TI)
        missing = -rows % _ROW_MULTIPLE
        if missing and x_TI.device.type == "cpu" and x_TI.dtype == torch.float32:
            x_TI = functional.pad(x_TI, (0, 0, 0, missing))
        return functional.linear(x_TI, self.weight_OI, self.bias_O)[:rows]


@dataclass(frozen=True, slots=True)
class PlainInt8Linear:
    """A `Linear` in int8, in PyTorch: exact integer sums, slowly."""

    weight_OPI: Tensor
    scale_OP: Tensor
    bias_O: Tensor | None = None

    @classmethod
    def of(
        cls, weight_OI: Tensor, bias_O: Tensor | None = None, *, num_parts: int = 1
    ) -> "PlainInt8Linear":
        """Quantises ``weight``; ``num_parts`` is as `quire.kernels.reference.quantize`'s."""
        return cls(*reference.quantize(weight_OI, num_parts=num_parts), bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        out_TO = reference.int8_linear(x_TI, self.weight_OPI, self.scale_OP)
        return (out_TO if self.bias_O is None else out_TO + self.bias_O).to(x_TI.dtype)


@dataclass(frozen=True, slots=True)
class PlainGatedLinear:
    """``silu(gate) * up``; the layer's output is gate, then up."""

    gate_up: Linear

    def __call__(self, x_TI: Tensor) -> Tensor:
        return reference.silu_and_mul(self.gate_up(x_TI))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """One layer's weights on this rank. A bias after a split input is on rank 0 only."""

    attention_norm_C: Tensor
    qkv: Linear
    """Output: Q heads, K heads, V heads."""
    o: Linear
    mlp_norm_C: Tensor
    gate_up: Linear
    """Gated: its output is ``[T, F]``."""
    down: Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """A rank's share of a model."""

    embedding_VC: Tensor
    layers: tuple[DecoderLayer, ...]
    norm_C: Tensor
    lm_head: Linear
    """Its output: this rank's part of the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """What the weights do not say."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    cos_PR: Tensor
    """float32, as is ``sin``."""
    sin_PR: Tensor
    is_shared: bool
    """By several ranks, that must sum what attention and MLP give them."""

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A step's input on the device."""

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    block_tables_BM: Tensor
    seq_lens_B: Tensor
    query_starts_B1: Tensor
    last_tokens_S: Tensor
    """Index in T of the last token of each row that is sampled."""
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    shared: SharedSplits | None = None
    """Decodes that read the same blocks, where there are enough of them."""


class Decoder(Protocol):
    """A whole forward pass."""

    def forward(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        all_reduce: Callable[[Tensor], Tensor],
        greatest_G2: Tensor | None = None,
    ) -> Tensor:
        """Computes the step's tokens and writes their KV.

        ``all_reduce`` sums a float32 tensor over the ranks, in place. Returns this rank's part of
        the float32 logits ``[S, V]``; but of the last G rows the logits are not kept: the greatest
        one and its column, the first of equals, are put into ``greatest_G2`` (float32).
        """
