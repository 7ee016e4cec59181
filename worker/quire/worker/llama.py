"""Llama on packed tokens: one rank's share of the forward pass.

The tokens of all sequences of a step lie one after the other in one tensor; only attention knows
where one sequence ends. Rounds where Hugging Face's Llama does. A row's result does not depend on
the other rows.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import AttentionBackend
from quire.kernels.decoder import Batch, DecoderLayer, DecoderShape, DecoderWeights, KvCache
from quire.worker.model_config import LlamaConfig, RopeConfig
from quire.worker.step import Longs
from quire.worker.tensor_parallel import TensorParallel

# T tokens of the step, packed   S rows that are sampled   G of these that are greedy
# C hidden size   R = D / 2
# H query heads   K KV heads (both: of this rank)   A = H + 2 K   D head size   V vocabulary


class Llama:
    """A rank's share of a model, with its weights."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: DecoderWeights,
        *,
        backend: AttentionBackend,
        tp: TensorParallel,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._weights = weights
        self._backend = backend
        self._tp = tp
        self.options = attention_options(config, max_model_len)
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(1, config.num_kv_heads // tp.size)
        cos_PR, sin_PR = rotary_tables(
            config.rope, config.head_size, max_model_len, device=weights.norm_C.device
        )
        self._shape = DecoderShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=config.head_size,
            eps=config.rms_norm_eps,
            cos_PR=cos_PR,
            sin_PR=sin_PR,
            is_shared=tp.size > 1,
        )
        self._decoder = backend.decoder(weights, self._shape)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache) -> Tensor | None:
        """Computes the step's tokens and writes their KV.

        Returns the float32 logits ``[S, V]`` on rank 0, ``None`` on the others.
        """
        if self._decoder is not None:
            logits = self._decoder.forward(batch, kv, all_reduce=self._tp.all_reduce)
        else:
            logits = self._forward(batch, kv)
        return self._tp.gather_columns(logits, num_columns=self._config.vocab_size)

    @property
    def chooses(self) -> bool:
        """Whether `forward_and_choose` is there."""
        return self._decoder is not None

    @torch.inference_mode()
    def forward_and_choose(
        self, batch: Batch, kv: KvCache, *, num_greedy: int
    ) -> tuple[Tensor, Longs] | None:
        """As `forward`, but the last ``num_greedy`` rows of S get no logits.

        Returns the others' logits and these rows' tokens: the first of the greatest. 128 rows of a
        vocabulary of 32,000 would be 16 MB to write and to read again.
        """
        assert self._decoder is not None
        greatest_G2 = torch.empty(num_greedy, 2)
        logits = self._decoder.forward(
            batch, kv, all_reduce=self._tp.all_reduce, greatest_G2=greatest_G2
        )
        num_columns = self._config.vocab_size
        token_ids = self._tp.gather_greatest(greatest_G2, num_columns=num_columns)
        gathered = self._tp.gather_columns(logits, num_columns=num_columns)
        return None if gathered is None or token_ids is None else (gathered, token_ids)

    def _forward(self, batch: Batch, kv: KvCache) -> Tensor:
        """Layer by layer."""
        weights, eps = self._weights, self._shape.eps
        cos_TR = self._shape.cos_PR.index_select(0, batch.positions_T)
        sin_TR = self._shape.sin_PR.index_select(0, batch.positions_T)
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
            x_TC = self._tp.all_reduce(layer.down(layer.gate_up(x_TC)))
        if residual_TC is not None:
            residual_TC = residual_TC.index_select(0, batch.last_tokens_S)
        x_SC = x_TC.index_select(0, batch.last_tokens_S)
        x_SC, _ = self._backend.rms_norm(x_SC, weights.norm_C, eps=eps, residual_TC=residual_TC)
        return weights.lm_head(x_SC).float()

    def _attention(
        self,
        x_TC: Tensor,
        layer: DecoderLayer,
        layer_kv: tuple[Tensor, Tensor],
        batch: Batch,
        cos_TR: Tensor,
        sin_TR: Tensor,
    ) -> Tensor:
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        qkv_TAD = layer.qkv(x_TC).view(len(x_TC), heads + 2 * kv_heads, self._shape.head_size)
        k_cache, v_cache = layer_kv
        q_THD = self._backend.rotate_and_write_kv(
            qkv_TAD,
            cos_TR,
            sin_TR,
            k_cache,
            v_cache,
            batch.slot_mapping_T,
            options=self.options,
        )
        out_THD = self._backend.attend(
            q_THD,
            k_cache,
            v_cache,
            block_tables_BM=batch.block_tables_BM,
            seq_lens_B=batch.seq_lens_B,
            query_starts_B1=batch.query_starts_B1,
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self._shape.scale,
            options=self.options,
            shared=batch.shared,
        )
        return self._tp.all_reduce(layer.o(out_THD.flatten(1)))


def attention_options(config: LlamaConfig, max_model_len: int) -> AttentionOptions:
    """What the layers ask of attention: a window that no sequence outgrows is none."""
    window = config.sliding_window
    return AttentionOptions(window=window if window and window < max_model_len else None)


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
