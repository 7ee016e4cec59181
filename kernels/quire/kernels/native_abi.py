"""What `native/quire.h` declares, for ctypes: same order, same types."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
STORE, STORE_F32, ADD, GATED, GREATEST = range(5)


class AttendArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("q", c_void_p),
        ("q_stride_t", c_int64),
        ("out", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("block_tables", c_void_p),
        ("bt_stride", c_int64),
        ("seq_lens", c_void_p),
        ("query_starts", c_void_p),
        ("num_rows", c_int32),
        ("num_decodes", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("scale", c_float),
        ("cache_is_int8", c_int32),
    )


class WriteKvArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_stride_t", c_int64),
        ("v_stride_t", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("cache_is_int8", c_int32),
    )


class LinearWeights(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_in", c_int64),
        ("num_out", c_int64),
        ("splits", c_int32),
        ("gated", c_int32),
        ("is_int8", c_int32),
    )


class PackArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("source", c_void_p),
        ("stride", c_int64),
        ("source_bias", c_void_p),
        ("weights", LinearWeights),
    )


class LinearArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("mode", c_int32),
        ("weights", POINTER(LinearWeights)),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_rows", c_int64),
        ("x_scales", c_void_p),
        ("num_greedy", c_int64),
        ("greatest", c_void_p),
    )


class QuantizeArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("splits", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("num_in", c_int64),
        ("num_rows", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("scales", c_void_p),
    )


class NormArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("x", c_void_p),
        ("rows", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("num_channels", c_int64),
        ("eps", c_float),
    )


class RotaryArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("x", c_void_p),
        ("x_stride_t", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("num_tokens", c_int64),
        ("num_heads", c_int32),
        ("head_size", c_int32),
        ("rotary_size", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", LinearWeights),
        ("o", LinearWeights),
        ("gate_up", LinearWeights),
        ("down", LinearWeights),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
    )


class ForwardArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("first_phase", c_int32),
        ("end_phase", c_int32),
        ("is_shared", c_int32),
        ("num_layers", c_int32),
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", LinearWeights),
        ("hidden_size", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("cache_is_int8", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("bt_stride", c_int64),
        ("seq_lens", c_void_p),
        ("query_starts", c_void_p),
        ("num_rows", c_int32),
        ("num_decodes", c_int32),
        ("num_samples", c_int64),
        ("last_tokens", c_void_p),
        ("residual", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("hidden", c_void_p),
        ("partial", c_void_p),
        ("quantized", c_void_p),
        ("quantized_stride", c_int64),
        ("scales", c_void_p),
        ("num_greedy", c_int64),
        ("greatest", c_void_p),
        ("logits", c_void_p),
    )


class ArgmaxArgs(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("stride", c_int64),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
    )


def declare(library: ctypes.CDLL) -> None:
    """Sets the functions' types."""
    signatures: dict[str, list[Any]] = {
        "quire_attend": [POINTER(AttendArgs)],
        "quire_write_kv": [POINTER(WriteKvArgs)],
        "quire_forward": [POINTER(ForwardArgs)],
        "quire_pack": [POINTER(PackArgs), c_int32],
        "quire_linear": [POINTER(LinearArgs), c_int32],
        "quire_int8_bytes": [POINTER(LinearWeights)],
        "quire_pack_int8": [POINTER(PackArgs), c_int32],
        "quire_quantize": [POINTER(QuantizeArgs), c_int32],
        "quire_rms_norm": [POINTER(NormArgs), c_int32],
        "quire_rotary": [POINTER(RotaryArgs), c_int32],
        "quire_argmax": [POINTER(ArgmaxArgs), c_int32],
        "quire_huge_pages": [c_void_p, c_int64],
        "quire_panel_columns": [],
    }
    results = {"quire_panel_columns": c_int32, "quire_int8_bytes": c_int64}
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = results.get(name)
