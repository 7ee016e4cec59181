"""What `native/quire.h` declares, for ctypes: same order, same types."""

import ctypes
from ctypes import POINTER, Structure, Union, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.ops import Clamped, GateActivation, NormKind, SharedExpert

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
STORE, STORE_F32, ADD, GATED, LOGITS_F32, GATED_GELU, GATED_CLAMPED = range(7)
NORM_KINDS: dict[NormKind, int] = {"rms": 0, "wide": 1, "layer": 2}
_ALL_TOKENS = (1 << 31) - 1


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
        ("bt_width", c_int64),
        ("seq_lens", c_void_p),
        ("query_starts", c_void_p),
        ("num_tokens", c_int64),
        ("num_blocks", c_int32),
        ("num_rows", c_int32),
        ("num_decodes", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("sinks", POINTER(c_float)),
        ("cache_is_int8", c_int32),
    )


def gate_mode(activation: GateActivation) -> int:
    """The `LinearMode` of a gated layer."""
    if isinstance(activation, Clamped):
        return GATED_CLAMPED
    return {"silu": GATED, "gelu_tanh": GATED_GELU}[activation]


def attention_fields(scale: float, options: AttentionOptions, num_heads: int) -> dict[str, Any]:
    """The fields of `AttendArgs` and `AttendOp` that say what becomes of the scores.

    Raises:
        ValueError: There is not a sink for each head.
    """
    sinks = options.sinks
    if sinks is not None and len(sinks) != num_heads:
        raise ValueError(f"{len(sinks)} sinks: must be {num_heads}, one for each query head")
    return {
        "sinks": None if sinks is None else (c_float * num_heads)(*sinks),
        "scale": scale,
        "soft_cap": options.soft_cap or 0.0,
        "window": min(options.window or 0, _ALL_TOKENS),
    }


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
        ("num_blocks", c_int32),
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
        ("group", c_int32),
        ("wide_scales", c_int32),
        ("has_zeros", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    )


class PackArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("source", c_void_p),
        ("stride", c_int64),
        ("source_bias", c_void_p),
        ("weights", LinearWeights),
        ("is_broken", POINTER(c_int32)),
        ("scales", c_void_p),
        ("zeros", c_void_p),
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
        ("scale", c_float),
        ("cap", c_float),
        ("wanted", c_void_p),
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
        ("bias", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("num_channels", c_int64),
        ("eps", c_float),
        ("kind", c_int32),
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


BUFFERS = {
    **{"residual": 0, "normed": 1, "qkv": 2, "queries": 2, "attended": 3, "hidden": 4},
    "branch": 5,
}
"""Where a program's values are kept: `QuireBuffer`. Queries stay where Q, K and V are."""
PARTIAL = 6
SCORES, CHOSEN, SHARES, PLACES, GATHERED, INNER, RESULTS = range(7, 14)
NUM_BUFFERS = 14
BUFFER_TYPES = {
    **dict.fromkeys((PARTIAL, SCORES, SHARES, RESULTS), torch.float32),
    **dict.fromkeys((CHOSEN, PLACES), torch.int32),
}
"""Of those that are not of the model's type."""
SHARED_EXPERTS: dict[SharedExpert, int] = {"none": 0, "plain": 1, "gated": 2}


class EmbedOp(Structure):
    kind = 1
    _fields_ = (("weight", c_void_p), ("out", c_int32))


class NormOp(Structure):
    kind = 2
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("next", POINTER(LinearWeights)),
        ("x", c_int32),
        ("out", c_int32),
        ("is_sampled", c_int32),
        ("eps", c_float),
        ("norm_kind", c_int32),
    )


class LinearOp(Structure):
    kind = 3
    _fields_ = (
        ("weights", POINTER(LinearWeights)),
        ("mode", c_int32),
        ("x", c_int32),
        ("out", c_int32),
        ("quantizes", c_int32),
    )


class RotateAndWriteOp(Structure):
    kind = 4
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_scale", c_void_p),
        ("x", c_int32),
        ("eps", c_float),
        ("norm_kind", c_int32),
        ("norms_all_heads", c_int32),
    )


class AttendOp(Structure):
    kind = 5
    _fields_ = (
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("x", c_int32),
        ("out", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("sinks", POINTER(c_float)),
    )


class RoundPartialOp(Structure):
    kind = 6
    _fields_ = (("bias", c_void_p), ("out", c_int32))


class AddOp(Structure):
    kind = 7
    _fields_ = (("x", c_int32), ("to", c_int32), ("scale", c_float))


class GeluOp(Structure):
    kind = 8
    _fields_ = (("x", c_int32),)


class LogitsOp(Structure):
    kind = 9
    _fields_ = (
        ("weights", POINTER(LinearWeights)),
        ("x", c_int32),
        ("scale", c_float),
        ("cap", c_float),
    )


class RouteOp(Structure):
    kind = 10
    _fields_ = (
        ("correction", c_void_p),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("groups", c_int32),
        ("top_groups", c_int32),
        ("is_sigmoid", c_int32),
        ("softmax_after_top_k", c_int32),
        ("renormalise", c_int32),
        ("shared", c_int32),
        ("scale", c_float),
    )


class RouteArgs(Structure):
    _fields_ = (
        ("how", RouteOp),
        ("scores", c_void_p),
        ("stride", c_int64),
        ("chosen", c_void_p),
        ("shares", c_void_p),
        ("num_tokens", c_int64),
    )


class ExpertsOp(Structure):
    kind = 11
    _fields_ = (
        ("ups", POINTER(LinearWeights)),
        ("downs", POINTER(LinearWeights)),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("has_shared", c_int32),
        ("mode", c_int32),
        ("x", c_int32),
    )


class MixOp(Structure):
    kind = 12
    _fields_ = (
        ("bias", c_void_p),
        ("top_k", c_int32),
        ("num_places", c_int32),
        ("out", c_int32),
    )


AnyOp = (
    EmbedOp
    | NormOp
    | LinearOp
    | RotateAndWriteOp
    | AttendOp
    | RoundPartialOp
    | AddOp
    | GeluOp
    | LogitsOp
    | RouteOp
    | ExpertsOp
    | MixOp
)
_OPS: dict[str, type[AnyOp]] = {
    "embed": EmbedOp,
    "norm": NormOp,
    "linear": LinearOp,
    "rotate_and_write": RotateAndWriteOp,
    "attend": AttendOp,
    "round_partial": RoundPartialOp,
    "add": AddOp,
    "gelu": GeluOp,
    "logits": LogitsOp,
    "route": RouteOp,
    "experts": ExpertsOp,
    "mix": MixOp,
}


class _AnyOp(Union):
    _fields_ = tuple(_OPS.items())


class Op(Structure):
    _anonymous_ = ("any",)
    _fields_ = (("kind", c_int32), ("any", _AnyOp))

    @classmethod
    def of(cls, op: AnyOp) -> "Op":
        name = next(name for name, kind in _OPS.items() if isinstance(op, kind))
        return cls(kind=op.kind, **{name: op})


class GreedyEdits(Structure):
    _fields_ = (
        ("biased_starts", c_void_p),
        ("biased_ids", c_void_p),
        ("bias", c_void_p),
        ("seen_starts", c_void_p),
        ("seen_ids", c_void_p),
        ("seen_counts", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("repetition", c_void_p),
        ("mask_of", c_void_p),
        ("masks", c_void_p),
        ("num_words", c_int64),
        ("first_column", c_int32),
    )


class WantedColumns(Structure):
    _fields_ = (
        ("mask_of", c_void_p),
        ("masks", c_void_p),
        ("num_words", c_int64),
        ("first_column", c_int32),
    )


class ForwardArgs(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("first_op", c_int32),
        ("end_op", c_int32),
        ("ops", POINTER(Op)),
        ("vocab_size", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("cache_is_int8", c_int32),
        ("num_positions", c_int64),
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("bt_stride", c_int64),
        ("bt_width", c_int64),
        ("seq_lens", c_void_p),
        ("query_starts", c_void_p),
        ("num_rows", c_int32),
        ("num_decodes", c_int32),
        ("num_samples", c_int64),
        ("last_tokens", c_void_p),
        ("buffers", c_void_p * NUM_BUFFERS),
        ("widths", c_int64 * NUM_BUFFERS),
        ("quantized", c_void_p),
        ("quantized_stride", c_int64),
        ("scales", c_void_p),
        ("max_splits", c_int64),
        ("num_greedy", c_int64),
        ("greatest", c_void_p),
        ("edits", c_void_p),
        ("wanted", c_void_p),
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


class SampleArgs(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("num_columns", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("log_min_p", c_void_p),
        ("uniform", c_void_p),
        ("out", c_void_p),
    )


class ScoreArgs(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("num_columns", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("num_top", c_void_p),
        ("max_top", c_int64),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("log_totals", c_void_p),
    )


class MaskArgs(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("num_columns", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("masks", c_void_p),
        ("num_words", c_int64),
    )


class Refusal(Structure):
    _fields_ = (
        ("what", c_int64),
        ("at", c_int64),
        ("value", c_int64),
        ("least", c_int64),
        ("end", c_int64),
    )


STRUCTURES: tuple[type[Structure], ...] = (
    *(AttendArgs, WriteKvArgs, LinearWeights, PackArgs, LinearArgs, QuantizeArgs),
    *(NormArgs, RotaryArgs, EmbedOp, NormOp, LinearOp, RotateAndWriteOp, AttendOp),
    *(RoundPartialOp, AddOp, GeluOp, LogitsOp, RouteOp, RouteArgs, ExpertsOp, MixOp, Op),
    *(GreedyEdits, ForwardArgs, ArgmaxArgs, SampleArgs, ScoreArgs, MaskArgs),
    *(WantedColumns, Refusal),
)
"""In the order of `quire_structure_bytes`."""

_INDICES = (
    *("token id", "position", "slot", "start of queries"),
    *("length of a sequence", "block id", "last token"),
)
"""What `Refusal.what` counts, from 1."""


def declare(library: ctypes.CDLL) -> None:
    """Sets the functions' types.

    Raises:
        RuntimeError: The library's structures are not these.
    """
    sizes = list((c_int64 * len(STRUCTURES)).in_dll(library, "quire_structure_bytes"))
    for structure, num_bytes in zip(STRUCTURES, sizes, strict=True):
        if ctypes.sizeof(structure) != num_bytes:
            raise RuntimeError(
                f"{structure.__name__} has {num_bytes} bytes in the native library, "
                f"{ctypes.sizeof(structure)} here: native_abi.py and quire.h differ"
            )
    signatures: dict[str, list[Any]] = {
        "quire_attend": [POINTER(AttendArgs)],
        "quire_write_kv": [POINTER(WriteKvArgs)],
        "quire_forward": [POINTER(ForwardArgs)],
        "quire_pack": [POINTER(PackArgs), c_int32],
        "quire_linear": [POINTER(LinearArgs), c_int32],
        "quire_int8_bytes": [POINTER(LinearWeights)],
        "quire_pack_int8": [POINTER(PackArgs), c_int32],
        "quire_w4_bytes": [POINTER(LinearWeights)],
        "quire_pack_w4": [POINTER(PackArgs), c_int32],
        "quire_quantize": [POINTER(QuantizeArgs), c_int32],
        "quire_norm": [POINTER(NormArgs), c_int32],
        "quire_rotary": [POINTER(RotaryArgs), c_int32],
        "quire_route": [POINTER(RouteArgs), c_int32],
        "quire_argmax": [POINTER(ArgmaxArgs), c_int32],
        "quire_sample": [POINTER(SampleArgs), c_int32],
        "quire_mask": [POINTER(MaskArgs), c_int32],
        "quire_score": [POINTER(ScoreArgs), c_int32],
        "quire_huge_pages": [c_void_p, c_int64],
        "quire_panel_columns": [],
    }
    results: dict[str, Any] = {"quire_panel_columns": c_int32}
    results |= dict.fromkeys(("quire_int8_bytes", "quire_w4_bytes"), c_int64)
    for name in ("quire_attend", "quire_write_kv", "quire_forward"):
        results[name] = Refusal
        getattr(library, name).errcheck = _raise_if_refused
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = results.get(name)


def _raise_if_refused(refusal: Refusal, function: object, arguments: object) -> None:
    """For every call of a function that may refuse one."""
    if not refusal.what:
        return
    least, end = refusal.least, refusal.end
    bounds = f"must be below {end}" if least == 0 else f"must be from {least} to {end - 1}"
    name = _INDICES[refusal.what - 1]
    raise IndexError(f"index out of range: {name} {refusal.value}, {bounds} (at {refusal.at})")
