"""The CPU backend over the native library. What the library does not do is PyTorch's."""

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from quire.kernels import native_abi
from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.cpu import CpuBackend
from quire.kernels.decoder import Decoder, DecoderShape, DecoderWeights, Linear
from quire.kernels.native_decoder import NativeDecoder
from quire.kernels.native_int8 import Int8Linear, can_pack_int8
from quire.kernels.native_linear import Arena, NativeLinear, PackedLinear, can_pack
from quire.kernels.quantization import Quantization
from quire.kernels.shared_prefix import SharedSplits

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   D head size   R half of the rotated size   C channels   I, O a layer's input, output


class NativeBackend(CpuBackend):
    """`quire.kernels.backend.AttentionBackend` for float32 and bfloat16; others go to
    `CpuBackend`."""

    name = "cpu-native"

    def __init__(self, library: ctypes.CDLL, *, quantization: Quantization | None = None) -> None:
        super().__init__(quantization=quantization)
        self._library = library
        self._arena = Arena(library)

    def pack_linear(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, num_parts: int = 1
    ) -> Linear:
        return self._pack(weight_OI, bias_O, num_parts=num_parts) or super().pack_linear(
            weight_OI, bias_O, num_parts=num_parts
        )

    def pack_gated_linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        return self._pack(weight_OI, bias_O, gated=True) or super().pack_gated_linear(
            weight_OI, bias_O
        )

    def _pack(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, num_parts: int = 1, gated: bool = False
    ) -> Linear | None:
        """``None`` where the library has no such layer."""
        kind, can = (
            (PackedLinear, can_pack) if self.quantization is None else (Int8Linear, can_pack_int8)
        )
        if not can(weight_OI, num_parts=num_parts):
            return None
        return kind(self._library, self._arena, weight_OI, bias_O, num_parts=num_parts, gated=gated)

    def decoder(self, weights: DecoderWeights, shape: DecoderShape) -> Decoder | None:
        layers = weights.layers
        linears = [x for layer in layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        if not all(isinstance(linear, NativeLinear) for linear in (*linears, weights.lm_head)):
            return None
        if not _can_attend(weights.norm_C.dtype, shape.head_size):
            return None
        return NativeDecoder(self._library, weights, shape)

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
        assert options == PLAIN, f"{options}: `backend_for` has another backend for these"
        if not _can_attend(k_TKD.dtype, k_TKD.shape[2]):
            return super().write_kv(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T)
        k_TKD, v_TKD = _dense_heads(k_TKD), _dense_heads(v_TKD)
        arguments = native_abi.WriteKvArgs(
            dtype=native_abi.DTYPES[k_TKD.dtype],
            k=k_TKD.data_ptr(),
            v=v_TKD.data_ptr(),
            k_stride_t=k_TKD.stride(0),
            v_stride_t=v_TKD.stride(0),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            slots=slot_mapping_T.data_ptr(),
            num_tokens=len(slot_mapping_T),
            num_kv_heads=k_TKD.shape[1],
            head_size=k_TKD.shape[2],
            block_size=k_cache.shape[1],
            cache_is_int8=k_cache.dtype == torch.int8,
        )
        self._library.quire_write_kv(byref(arguments))

    def attend(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_tables_BM: Tensor,
        seq_lens_B: Tensor,
        query_starts_B1: Tensor,
        num_decodes: int,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        options: AttentionOptions = PLAIN,
        shared: SharedSplits | None = None,
    ) -> Tensor:
        del shared  # the library finds out by itself
        assert options == PLAIN, f"{options}: `backend_for` has another backend for these"
        if not _can_attend(q_THD.dtype, q_THD.shape[2]):
            return super().attend(
                q_THD,
                k_cache,
                v_cache,
                block_tables_BM=block_tables_BM,
                seq_lens_B=seq_lens_B,
                query_starts_B1=query_starts_B1,
                num_decodes=num_decodes,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                scale=scale,
            )
        q_THD = _dense_heads(q_THD)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        arguments = native_abi.AttendArgs(
            dtype=native_abi.DTYPES[q_THD.dtype],
            q=q_THD.data_ptr(),
            q_stride_t=q_THD.stride(0),
            out=out_THD.data_ptr(),
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            block_tables=block_tables_BM.data_ptr(),
            bt_stride=block_tables_BM.stride(0),
            seq_lens=seq_lens_B.data_ptr(),
            query_starts=query_starts_B1.data_ptr(),
            num_rows=len(seq_lens_B),
            num_decodes=num_decodes,
            num_heads=q_THD.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_size=q_THD.shape[2],
            block_size=k_cache.shape[1],
            scale=scale,
            cache_is_int8=k_cache.dtype == torch.int8,
        )
        self._library.quire_attend(byref(arguments))
        return out_THD

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if x_TC.dtype not in native_abi.DTYPES:
            return super().rms_norm(x_TC, weight_C, eps=eps, residual_TC=residual_TC)
        sum_TC = (x_TC if residual_TC is None else x_TC + residual_TC).contiguous()
        out_TC = torch.empty_like(sum_TC)
        arguments = native_abi.NormArgs(
            dtype=native_abi.DTYPES[x_TC.dtype],
            x=sum_TC.data_ptr(),
            weight=weight_C.data_ptr(),
            out=out_TC.data_ptr(),
            num_rows=len(sum_TC),
            num_channels=sum_TC.shape[1],
            eps=eps,
        )
        self._library.quire_rms_norm(byref(arguments), torch.get_num_threads())
        return out_TC, sum_TC

    def rotary_embedding(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        if x_THD.dtype not in native_abi.DTYPES:
            return super().rotary_embedding(x_THD, cos_TR, sin_TR)
        out_THD = x_THD.clone(memory_format=torch.contiguous_format)
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
        rows_T = torch.arange(len(x_THD))
        arguments = native_abi.RotaryArgs(
            dtype=native_abi.DTYPES[x_THD.dtype],
            x=out_THD.data_ptr(),
            x_stride_t=out_THD.stride(0),
            cos=cos_TR.data_ptr(),
            sin=sin_TR.data_ptr(),
            positions=rows_T.data_ptr(),
            num_tokens=len(out_THD),
            num_heads=out_THD.shape[1],
            head_size=out_THD.shape[2],
            rotary_size=2 * cos_TR.shape[1],
        )
        self._library.quire_rotary(byref(arguments), torch.get_num_threads())
        return out_THD


def _can_attend(dtype: torch.dtype, head_size: int) -> bool:
    """Else PyTorch attends: the two lay out a block's tokens in different ways."""
    return dtype in native_abi.DTYPES and head_size % 16 == 0 and head_size <= 256


def _dense_heads(x_THD: Tensor) -> Tensor:
    """A token's heads side by side."""
    dense = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]
    return x_THD if dense else x_THD.contiguous()
