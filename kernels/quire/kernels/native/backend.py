"""The CPU backend over the native library. PyTorch computes what the library does not support."""

import ctypes
import logging
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Rows
from quire.kernels.grouped import GroupedWeight, decoded, round_to_groups
from quire.kernels.native import abi as native_abi
from quire.kernels.native.check import (
    NotNative,
    check_caches,
    check_heads,
    norm_pointer,
    pointer,
    rows_pointer,
)
from quire.kernels.native.experts import route_op
from quire.kernels.native.int8 import Int8Linear
from quire.kernels.native.linear import Arena, PackedLinear
from quire.kernels.native.ops import can_attend
from quire.kernels.native.program import NativeProgram
from quire.kernels.ops import GateActivation, LinearLayer, NormKind, Program, ProgramRunner
from quire.kernels.quantization import Quantization
from quire.kernels.torch.cpu import CpuBackend
from quire.kernels.torch.experts import Router

_log = logging.getLogger(__name__)

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   D head size   R half of the rotated size   C channels   I, O a layer's input, output
# k, X, S as in `quire.kernels.torch.experts`


class NativeBackend(CpuBackend):
    """`quire.kernels.backend.AttentionBackend` for float32 and bfloat16. Other types use
    `CpuBackend`."""

    name = "cpu-native"

    def __init__(self, library: ctypes.CDLL, *, quantization: Quantization | None = None) -> None:
        super().__init__(quantization=quantization)
        self._library = library
        self._arena = Arena(library)

    def is_head_major(self, dtype: torch.dtype, head_size: int) -> bool:
        return _can_attend(dtype, head_size)

    def pack_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        num_parts: int = 1,
        is_lm_head: bool = False,
    ) -> LinearLayer:
        kind = self._kind(is_lm_head=is_lm_head)
        return self._pack(weight_OI, bias_O, kind, num_parts=num_parts) or super().pack_linear(
            weight_OI, bias_O, num_parts=num_parts, is_lm_head=is_lm_head
        )

    def pack_gated_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        activation: GateActivation = "silu",
    ) -> LinearLayer:
        kind = self._kind(is_lm_head=False)
        packed = self._pack(weight_OI, bias_O, kind, gated=True, activation=activation)
        return packed or super().pack_gated_linear(weight_OI, bias_O, activation=activation)

    def _pack(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None,
        kind: Quantization | None,
        *,
        num_parts: int = 1,
        gated: bool = False,
        activation: GateActivation = "silu",
    ) -> LinearLayer | None:
        """Packs a layer for the library; ``None`` if it does not support such a layer."""
        options: dict[str, Any] = {
            "num_parts": num_parts,
            "gated": gated,
            "activation": activation,
        }
        if kind == "int8":
            weight_OI = decoded(weight_OI)
            if not Int8Linear.can_pack(weight_OI, num_parts=num_parts):
                return None
            return Int8Linear(self._library, self._arena, weight_OI, bias_O, **options)
        if kind == "w4" and isinstance(weight_OI, Tensor):
            weight_OI = round_to_groups(weight_OI, num_parts=num_parts) or weight_OI
        if not PackedLinear.can_pack(weight_OI, num_parts=num_parts):
            weight_OI = decoded(weight_OI)
        if not PackedLinear.can_pack(weight_OI, num_parts=num_parts):
            return None
        return PackedLinear(self._library, self._arena, weight_OI, bias_O, **options)

    def pack_router(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearLayer:
        # Products of two bfloat16 values are exact in float32.
        packed = self._pack(weight_OI, bias_O, None)
        return packed or super().pack_router(weight_OI, bias_O)

    def choose_experts(self, router: Router, score_TX: Tensor) -> tuple[Tensor, Tensor]:
        how, (num_tokens, num_scores) = route_op(router), score_TX.shape
        chosen_Tk = torch.empty(num_tokens, router.top_k, dtype=torch.int32)
        weights_TS = torch.empty(num_tokens, router.top_k + (router.shared != "none"))
        arguments = native_abi.RouteArgs(
            how=how,
            scores=pointer("scores", score_TX, torch.float32, num_tokens, router.num_scores),
            stride=num_scores,
            chosen=chosen_Tk.data_ptr(),
            shares=weights_TS.data_ptr(),
            num_tokens=num_tokens,
        )
        self._library.quire_route(byref(arguments), torch.get_num_threads())
        return chosen_Tk.long(), weights_TS

    def prepare(self, program: Program) -> ProgramRunner:
        try:
            return NativeProgram(self._library, program)
        except NotNative as reason:
            _log.warning("steps run operation by operation, somewhat slower: no native %s", reason)
            return super().prepare(program)

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
        if not _can_attend(k_TKD.dtype, k_TKD.shape[2]):
            return super().write_kv(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, options=options)
        k_TKD, v_TKD = _dense_heads(k_TKD), _dense_heads(v_TKD)
        num_tokens, num_kv_heads, head_size = k_TKD.shape
        num_blocks, block_size = check_caches(
            *(k_cache, v_cache), dtype=k_TKD.dtype, num_kv_heads=num_kv_heads, head_size=head_size
        )
        arguments = native_abi.WriteKvArgs(
            dtype=native_abi.DTYPES[k_TKD.dtype],
            k=rows_pointer("K", k_TKD, k_TKD.dtype, *k_TKD.shape),
            v=rows_pointer("V", v_TKD, k_TKD.dtype, *k_TKD.shape),
            k_stride_t=k_TKD.stride(0),
            v_stride_t=v_TKD.stride(0),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            slots=pointer("slot mapping", slot_mapping_T, torch.int64, num_tokens),
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            cache_is_int8=k_cache.dtype == torch.int8,
        )
        self._library.quire_write_kv(byref(arguments))

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
        if not _can_attend(q_THD.dtype, q_THD.shape[2]):
            return super().attend(q_THD, k_cache, v_cache, rows, scale=scale, options=options)
        q_THD = _dense_heads(q_THD)
        num_tokens, num_heads, head_size = q_THD.shape
        num_kv_heads, num_rows = k_cache.shape[2], len(rows.seq_lens_B)
        check_heads(num_heads, num_kv_heads)
        num_blocks, block_size = check_caches(
            *(k_cache, v_cache), dtype=q_THD.dtype, num_kv_heads=num_kv_heads, head_size=head_size
        )
        tables_BM = rows.block_tables_BM
        width = tables_BM.shape[1]
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        arguments = native_abi.AttendArgs(
            dtype=native_abi.DTYPES[q_THD.dtype],
            q=rows_pointer("Q", q_THD, q_THD.dtype, *q_THD.shape),
            q_stride_t=q_THD.stride(0),
            out=out_THD.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            block_tables=rows_pointer("block tables", tables_BM, torch.int32, num_rows, width),
            bt_stride=tables_BM.stride(0),
            bt_width=width,
            seq_lens=pointer("lengths of sequences", rows.seq_lens_B, torch.int32, num_rows),
            query_starts=pointer("query starts", rows.query_starts_B1, torch.int32, num_rows + 1),
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            cache_is_int8=k_cache.dtype == torch.int8,
            **native_abi.attention_fields(scale, options, num_heads),
        )
        self._library.quire_attend(byref(arguments))
        return out_THD

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if x_TC.dtype not in native_abi.DTYPES:
            return super().rms_norm(x_TC, weight_C, eps=eps, residual_TC=residual_TC)
        sum_TC = (x_TC if residual_TC is None else x_TC + residual_TC).contiguous()
        return self._norm(sum_TC, weight_C, None, eps=eps, kind="rms"), sum_TC

    def wide_norm(
        self,
        x_TC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor | None,
        *,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        if x_TC.dtype not in native_abi.DTYPES:
            return super().wide_norm(x_TC, weight_C, bias_C, eps=eps, is_centred=is_centred)
        kind: NormKind = "layer" if is_centred else "wide"
        return self._norm(x_TC.contiguous(), weight_C, bias_C, eps=eps, kind=kind)

    def _norm(
        self, x_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, *, eps: float, kind: NormKind
    ) -> Tensor:
        out_TC = torch.empty_like(x_TC)
        shape = (kind, x_TC.dtype, x_TC.shape[1])
        arguments = native_abi.NormArgs(
            dtype=native_abi.DTYPES[x_TC.dtype],
            x=pointer("what is normed", x_TC, x_TC.dtype, *x_TC.shape),
            weight=norm_pointer("a norm's weight", weight_C, *shape),
            bias=None if bias_C is None else norm_pointer("a norm's bias", bias_C, *shape),
            out=out_TC.data_ptr(),
            num_rows=len(x_TC),
            num_channels=x_TC.shape[1],
            eps=eps,
            kind=native_abi.NORM_KINDS[kind],
        )
        self._library.quire_norm(byref(arguments), torch.get_num_threads())
        return out_TC

    def rotary_embedding(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        if x_THD.dtype not in native_abi.DTYPES:
            return super().rotary_embedding(x_THD, cos_TR, sin_TR)
        out_THD = x_THD.clone(memory_format=torch.contiguous_format)
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
        rows_T = torch.arange(len(x_THD))
        half = cos_TR.shape[1]
        if 2 * half > x_THD.shape[2]:
            raise ValueError(f"{2 * half} channels to rotate: a head has {x_THD.shape[2]}")
        arguments = native_abi.RotaryArgs(
            dtype=native_abi.DTYPES[x_THD.dtype],
            x=pointer("what is rotated", out_THD, x_THD.dtype, *x_THD.shape),
            x_stride_t=out_THD.stride(0),
            cos=pointer("cos", cos_TR, torch.float32, len(x_THD), half),
            sin=pointer("sin", sin_TR, torch.float32, len(x_THD), half),
            positions=rows_T.data_ptr(),
            num_tokens=len(out_THD),
            num_heads=out_THD.shape[1],
            head_size=out_THD.shape[2],
            rotary_size=2 * half,
        )
        self._library.quire_rotary(byref(arguments), torch.get_num_threads())
        return out_THD


def _can_attend(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the library computes attention, rather than PyTorch, whose block layout differs."""
    return dtype in native_abi.DTYPES and can_attend(head_size)


def _dense_heads(x_THD: Tensor) -> Tensor:
    """A tensor in which a token's heads are contiguous."""
    dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if dense else x_THD.contiguous()
