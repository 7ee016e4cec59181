"""Llama on packed tokens: one rank's share of the forward pass.

The tokens of all sequences of a step lie one after the other in one tensor; only attention knows
where one sequence ends. Rounds where Hugging Face's Llama does.

A row's result does not depend on the other rows. On CPUs MKL's float32 product takes another
order of summation for one to three rows than for more, and also for such a remainder of a
thread's rows; so rows are filled up to a multiple of four.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.backend import AttentionBackend
from quire.worker.loader import LayerWeights, LlamaWeights
from quire.worker.model_config import LlamaConfig, RopeConfig
from quire.worker.tensor_parallel import TensorParallel

# T tokens of the step, packed   B sequences   M blocks of the longest   S rows that are sampled
# C hidden size   H query heads   K KV heads (both: of this rank)   D head size   R = D / 2
# V vocabulary

KvCache = list[tuple[Tensor, Tensor]]
"""K and V of each layer: ``[num_blocks, block_size, K, D]``."""

_ROW_MULTIPLE = 4


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


class Llama:
    """A rank's share of a model, with its weights."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        *,
        backend: AttentionBackend,
        tp: TensorParallel,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._backend = backend
        self._tp = tp
        self._scale = config.head_size**-0.5
        self._num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(1, config.num_kv_heads // tp.size)
        self._cos_PR, self._sin_PR = rotary_tables(
            config.rope, config.head_size, max_model_len, device=weights.norm_C.device
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache) -> Tensor | None:
        """Computes the step's tokens and writes their KV.

        Returns the float32 logits ``[S, V]`` on rank 0, ``None`` on the others.
        """
        weights, eps = self._weights, self._config.rms_norm_eps
        cos_TR = self._cos_PR.index_select(0, batch.positions_T)
        sin_TR = self._sin_PR.index_select(0, batch.positions_T)
        x_TC = functional.embedding(batch.token_ids_T, weights.embedding_VC)
        residual_TC: Tensor | None = None
        for layer, layer_kv in zip(weights.layers, kv, strict=True):
            x_TC, residual_TC = self._backend.rms_norm(
                x_TC, layer.attention_norm_C, eps=eps, residual_TC=residual_TC
            )
            x_TC = self._attention(x_TC, layer, layer_kv, batch, cos_TR, sin_TR)
            x_TC, residual_TC = self._backend.rms_norm(
                x_TC, layer.mlp_norm_C, eps=eps, residual_TC=residual_TC
            )
            x_TC = self._mlp(x_TC, layer)
        if residual_TC is not None:
            residual_TC = residual_TC.index_select(0, batch.last_tokens_S)
        x_SC = x_TC.index_select(0, batch.last_tokens_S)
        x_SC, _ = self._backend.rms_norm(x_SC, weights.norm_C, eps=eps, residual_TC=residual_TC)
        logits = _linear(x_SC, weights.lm_head, None).float()
        return self._tp.gather_columns(logits, num_columns=self._config.vocab_size)

    def _attention(
        self,
        x_TC: Tensor,
        layer: LayerWeights,
        layer_kv: tuple[Tensor, Tensor],
        batch: Batch,
        cos_TR: Tensor,
        sin_TR: Tensor,
    ) -> Tensor:
        heads, kv_heads = self._num_heads, self.num_kv_heads
        qkv = _linear(x_TC, layer.qkv, layer.qkv_bias)
        qkv_THD = qkv.view(len(x_TC), heads + 2 * kv_heads, self._config.head_size)
        # Q and K lie side by side, so one call rotates both.
        qk_THD = self._backend.rotary_embedding(qkv_THD[:, : heads + kv_heads], cos_TR, sin_TR)
        k_cache, v_cache = layer_kv
        self._backend.write_kv(
            qk_THD[:, heads:],
            qkv_THD[:, heads + kv_heads :],
            k_cache,
            v_cache,
            batch.slot_mapping_T,
        )
        out_THD = self._backend.attend(
            qk_THD[:, :heads],
            k_cache,
            v_cache,
            block_tables_BM=batch.block_tables_BM,
            seq_lens_B=batch.seq_lens_B,
            query_starts_B1=batch.query_starts_B1,
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self._scale,
        )
        return self._tp.all_reduce(_linear(out_THD.flatten(1), layer.o, layer.o_bias))

    def _mlp(self, x_TC: Tensor, layer: LayerWeights) -> Tensor:
        gate_up = _linear(x_TC, layer.gate_up, layer.gate_up_bias)
        hidden = self._backend.silu_and_mul(gate_up)
        return self._tp.all_reduce(_linear(hidden, layer.down, layer.down_bias))


def rotary_tables(
    rope: RopeConfig, head_size: int, num_positions: int, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[num_positions, head_size / 2]`` in float32, as Hugging Face's."""
    exponents_R = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    inverse_R = 1.0 / (rope.theta**exponents_R)
    if rope.rope_type == "linear":
        inverse_R = inverse_R / rope.factor
    elif rope.rope_type == "llama3":
        inverse_R = _stretch_llama3(inverse_R, rope)
    angles_PR = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_R)
    return angles_PR.cos().to(device), angles_PR.sin().to(device)


def _stretch_llama3(inverse_R: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones are not, those between are blended."""
    turns_R = rope.original_max_position_embeddings * inverse_R / (2 * math.pi)
    blend_R = (turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_R = blend_R.clamp(0, 1)
    return (1 - blend_R) * inverse_R / rope.factor + blend_R * inverse_R


def _linear(x_TC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(x_TC)
    missing = -rows % _ROW_MULTIPLE
    if missing and x_TC.device.type == "cpu" and x_TC.dtype == torch.float32:
        x_TC = functional.pad(x_TC, (0, 0, 0, missing))
        return functional.linear(x_TC, weight, bias)[:rows]
    return functional.linear(x_TC, weight, bias)
