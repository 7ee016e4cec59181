"""The GPU backend: Triton kernels for everything except matrix products.

Decodes use the split-context kernel, all other rows the prefill kernel. No call waits for the
device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Rows
from quire.kernels.grouped import GroupedWeight
from quire.kernels.loop import Loop
from quire.kernels.ops import GateActivation, LinearLayer, MixExperts, Program, ProgramRunner
from quire.kernels.rewrites import fuse_add_norm, gather_before_add
from quire.kernels.torch.experts import Router
from quire.kernels.torch.linear import PlainGatedLinear, PlainLinear, wide_linear
from quire.kernels.torch.low_rank import LowRankLayers
from quire.kernels.triton import elementwise as triton_elementwise
from quire.kernels.triton import kv_write as triton_kv_write
from quire.kernels.triton import rotary as triton_rotary
from quire.kernels.triton.decode import decode_attention
from quire.kernels.triton.experts import (
    ExpertWeights,
    SortedPairs,
    multiply_down,
    multiply_up,
)
from quire.kernels.triton.grouped import GroupedLinear
from quire.kernels.triton.low_rank import TritonLowRank
from quire.kernels.triton.prefill import prefill_attention

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   A heads of Q, K and V together   D head size   R half of the rotated size
# C channels   I, O a linear layer's input and output


class TritonBackend:
    """`quire.kernels.backend.AttentionBackend` for CUDA devices."""

    name = "triton"

    def __init__(self) -> None:
        self._experts: dict[int, tuple[ExpertWeights, ExpertWeights]] = {}
        """The weights of the experts' first and last products, by their operation's id."""

    def is_head_major(self, dtype: torch.dtype, head_size: int) -> bool:
        return False

    def write_kv(
        self,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
        *,
        options: AttentionOptions = PLAIN,
    ) -> None:
        triton_kv_write.write_kv(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, options=options)

    def attend(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Rows,
        *,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        decode_attention(
            q_THD[: rows.num_decodes],
            k_cache,
            v_cache,
            out_THD[: rows.num_decodes],
            block_tables_BM=rows.block_tables_BM,
            seq_lens_B=rows.seq_lens_B,
            max_seq_len=rows.max_seq_len,
            scale=scale,
            options=options,
            shared=rows.shared,
        )
        prefill_attention(
            q_THD,
            k_cache,
            v_cache,
            out_THD,
            block_tables_BM=rows.block_tables_BM,
            seq_lens_B=rows.seq_lens_B,
            query_starts_B1=rows.query_starts_B1,
            first_row=rows.num_decodes,
            max_query_len=rows.max_query_len,
            max_seq_len=rows.max_seq_len,
            scale=scale,
            options=options,
        )
        return out_THD

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return triton_elementwise.rms_norm(x_TC, weight_C, eps=eps, residual_TC=residual_TC)

    def wide_norm(
        self,
        x_TC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor | None,
        *,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        return triton_elementwise.wide_norm(x_TC, weight_C, bias_C, eps=eps, is_centred=is_centred)

    def rotate_and_write_kv(
        self,
        qkv_TAD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
        *,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Rotates Q and K and writes K and V in one kernel; returns Q."""
        return triton_rotary.rotate_and_write_kv(
            qkv_TAD, cos_TR, sin_TR, k_cache, v_cache, slot_mapping_T, options=options
        )

    def pack_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        num_parts: int = 1,
        is_lm_head: bool = False,
    ) -> LinearLayer:
        del num_parts, is_lm_head
        if isinstance(weight_OI, GroupedWeight):
            return GroupedLinear.of(weight_OI, bias_O)
        return PlainLinear(weight_OI, bias_O)

    def pack_gated_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        activation: GateActivation = "silu",
    ) -> LinearLayer:
        gate_up = self.pack_linear(weight_OI, bias_O)
        if activation == "silu":
            return GatedLinear(gate_up)
        return PlainGatedLinear(gate_up, activation)

    def pack_router(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearLayer:
        return wide_linear(weight_OI, bias_O)

    def choose_experts(self, router: Router, score_TX: Tensor) -> tuple[Tensor, Tensor]:
        return router.choose(score_TX)

    def multiply_experts(self, op: MixExperts, x_TC: Tensor, experts_Tk: Tensor) -> Tensor:
        up, down = self._experts[id(op)]
        pairs = SortedPairs.of(experts_Tk, num_experts=len(op.experts))
        gate_up_NG = multiply_up(x_TC, up, pairs)
        layer = op.experts[0].up
        assert isinstance(layer, PlainGatedLinear)
        return multiply_down(layer.activate(gate_up_NG), down, pairs)

    def low_rank_layers(self, program: Program) -> LowRankLayers:
        return TritonLowRank(program)

    def prepare(self, program: Program) -> ProgramRunner:
        for op in program:
            if isinstance(op, MixExperts):
                self._experts[id(op)] = (
                    _weights([each.up for each in op.experts]),
                    _weights([each.down for each in op.experts]),
                )
        return Loop(self, fuse_add_norm(gather_before_add(program)))


class GatedLinear(PlainGatedLinear):
    """``silu(gate) * up`` in one kernel; the layer's output is gate, then up."""

    __slots__ = ()

    def activate(self, gate_up_TG: Tensor) -> Tensor:
        return triton_elementwise.silu_and_mul(gate_up_TG)


def _weights(layers: Sequence[LinearLayer]) -> ExpertWeights:
    """The weights of experts' layers, which this backend packed."""
    plain: list[PlainLinear] = []
    for layer in layers:
        product = layer.gate_up if isinstance(layer, PlainGatedLinear) else layer
        if isinstance(product, GroupedLinear):
            product = PlainLinear(product.decode(), product.bias_O)
        assert isinstance(product, PlainLinear)
        plain.append(product)
    return ExpertWeights.of(
        tuple(each.weight_OI for each in plain),
        tuple(each.bias_O for each in plain if each.bias_O is not None),
    )
