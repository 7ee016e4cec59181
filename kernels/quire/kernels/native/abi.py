"""The C ABI of the native library, as its header `native/quire.h` declares it.

Structures have the header's fields in the header's order. This module maps Python's names to the
header's constants. A library's file name contains a hash of its header, so the two always agree.
"""

import ctypes
from ctypes import Structure
from pathlib import Path
from typing import Any

import torch

from quire import native_header
from quire.kernels.attention_options import AttentionOptions
from quire.kernels.ops import Clamped, GateActivation, NormKind, SharedExpert, Value

HEADER = native_header.read(Path(__file__).with_name("quire.h"))
_STRUCTURES, _CONSTANTS = HEADER.structures, HEADER.constants

AttendArgs = _STRUCTURES["AttendArgs"]
WriteKvArgs = _STRUCTURES["WriteKvArgs"]
LinearWeights = _STRUCTURES["LinearWeights"]
LowRankWeights = _STRUCTURES["LowRankWeights"]
PackArgs = _STRUCTURES["PackArgs"]
LinearArgs = _STRUCTURES["LinearArgs"]
QuantizeArgs = _STRUCTURES["QuantizeArgs"]
NormArgs = _STRUCTURES["NormArgs"]
RotaryArgs = _STRUCTURES["RotaryArgs"]
RouteArgs = _STRUCTURES["RouteArgs"]
ArgmaxArgs = _STRUCTURES["ArgmaxArgs"]
SampleArgs = _STRUCTURES["SampleArgs"]
ScoreArgs = _STRUCTURES["ScoreArgs"]
MaskArgs = _STRUCTURES["MaskArgs"]
SharedGroup = _STRUCTURES["SharedGroup"]
CopyBlocksArgs = _STRUCTURES["CopyBlocksArgs"]

ForwardArgs = _STRUCTURES["ForwardArgs"]
GreedyEdits = _STRUCTURES["GreedyEdits"]
WantedColumns = _STRUCTURES["WantedColumns"]

Op = _STRUCTURES["Op"]
EmbedOp = _STRUCTURES["EmbedOp"]
NormOp = _STRUCTURES["NormOp"]
LinearOp = _STRUCTURES["LinearOp"]
RotateAndWriteOp = _STRUCTURES["RotateAndWriteOp"]
AttendOp = _STRUCTURES["AttendOp"]
RoundPartialOp = _STRUCTURES["RoundPartialOp"]
AddOp = _STRUCTURES["AddOp"]
GeluOp = _STRUCTURES["GeluOp"]
LogitsOp = _STRUCTURES["LogitsOp"]
RouteOp = _STRUCTURES["RouteOp"]
ExpertsOp = _STRUCTURES["ExpertsOp"]
MixOp = _STRUCTURES["MixOp"]

DTYPES = {torch.float32: _CONSTANTS["QUIRE_F32"], torch.bfloat16: _CONSTANTS["QUIRE_BF16"]}
STORE, STORE_F32 = _CONSTANTS["QUIRE_STORE"], _CONSTANTS["QUIRE_STORE_F32"]
ADD, GATED = _CONSTANTS["QUIRE_ADD"], _CONSTANTS["QUIRE_GATED"]
ATTEND, ROUND_PARTIAL = _CONSTANTS["QUIRE_ATTEND"], _CONSTANTS["QUIRE_ROUND_PARTIAL"]
NORM_KINDS: dict[NormKind, int] = {
    "rms": _CONSTANTS["QUIRE_RMS_NORM"],
    "wide": _CONSTANTS["QUIRE_WIDE_NORM"],
    "layer": _CONSTANTS["QUIRE_LAYER_NORM"],
}
SHARED_EXPERTS: dict[SharedExpert, int] = {
    "none": _CONSTANTS["QUIRE_NOT_SHARED"],
    "plain": _CONSTANTS["QUIRE_SHARED"],
    "gated": _CONSTANTS["QUIRE_SHARED_GATED"],
}
BUFFERS: dict[Value, int] = {
    "residual": _CONSTANTS["QUIRE_RESIDUAL"],
    "normed": _CONSTANTS["QUIRE_NORMED"],
    "qkv": _CONSTANTS["QUIRE_QKV"],
    "queries": _CONSTANTS["QUIRE_QKV"],  # Queries stay in the buffer of Q, K and V.
    "attended": _CONSTANTS["QUIRE_ATTENDED"],
    "hidden": _CONSTANTS["QUIRE_HIDDEN"],
    "branch": _CONSTANTS["QUIRE_BRANCH"],
}
"""The buffer of each of a program's values."""
PARTIAL = _CONSTANTS["QUIRE_PARTIAL"]
SCORES, CHOSEN = _CONSTANTS["QUIRE_SCORES"], _CONSTANTS["QUIRE_CHOSEN"]
SHARES, PLACES = _CONSTANTS["QUIRE_SHARES"], _CONSTANTS["QUIRE_PLACES"]
GATHERED, INNER = _CONSTANTS["QUIRE_GATHERED"], _CONSTANTS["QUIRE_INNER"]
RESULTS = _CONSTANTS["QUIRE_RESULTS"]
SUMMED = {PARTIAL, RESULTS}
"""Buffers that are summed over the ranks, if there are several."""
BUFFER_TYPES = {
    **dict.fromkeys((PARTIAL, SCORES, SHARES, RESULTS), torch.float32),
    **dict.fromkeys((CHOSEN, PLACES), torch.int32),
}
"""Types of the buffers whose type is not the model's."""

_ALL_TOKENS = (1 << 31) - 1
_FIELDS_OF_OP: Any = Op._fields_
_MEMBERS = {kind: name for name, kind in dict(_FIELDS_OF_OP)["any"]._fields_}
_INDICES = {
    _CONSTANTS["QUIRE_TOKEN_ID"]: "token id",
    _CONSTANTS["QUIRE_POSITION"]: "position",
    _CONSTANTS["QUIRE_SLOT"]: "slot",
    _CONSTANTS["QUIRE_QUERY_START"]: "start of queries",
    _CONSTANTS["QUIRE_SEQUENCE_LENGTH"]: "length of a sequence",
    _CONSTANTS["QUIRE_BLOCK_ID"]: "block id",
    _CONSTANTS["QUIRE_LAST_TOKEN"]: "last token",
    _CONSTANTS["QUIRE_ADAPTER_SLOT"]: "adapter slot",
}


def gate_mode(activation: GateActivation) -> int:
    """The `LinearMode` of a gated layer."""
    if isinstance(activation, Clamped):
        return _CONSTANTS["QUIRE_GATED_CLAMPED"]
    return {"silu": GATED, "gelu_tanh": _CONSTANTS["QUIRE_GATED_GELU"]}[activation]


def attention_fields(scale: float, options: AttentionOptions, num_heads: int) -> dict[str, Any]:
    """The fields of `AttendArgs` and `AttendOp` for the attention options. Their pointers are valid
    as long as ``options`` lives.

    Raises:
        ValueError: The number of sinks is not the number of heads.
    """
    sinks = options.sinks_H
    if sinks is not None and len(sinks) != num_heads:
        raise ValueError(f"{len(sinks)} sinks: must be {num_heads}, one for each query head")
    return {
        "sinks": None if sinks is None else sinks.ctypes.data,
        "scale": scale,
        "soft_cap": options.soft_cap or 0.0,
        "window": min(options.window or 0, _ALL_TOKENS),
        "lookahead": min(options.lookahead, _ALL_TOKENS),
    }


def op_of(op: Structure) -> Structure:
    """Wraps an operation's structure in an `Op`."""
    member = _MEMBERS[type(op)]
    return Op(kind=_CONSTANTS[f"QUIRE_{member.upper()}"], **{member: op})


def declare(library: ctypes.CDLL) -> None:
    """Sets the functions' types; functions that refuse a call then raise IndexError."""
    HEADER.declare(library)
    for name, (result, _) in HEADER.functions.items():
        if result is _STRUCTURES["QuireRefusal"]:
            getattr(library, name).errcheck = _raise_if_refused


def _raise_if_refused(refusal: Any, function: object, arguments: object) -> None:
    if not refusal.what:
        return
    least, end = refusal.least, refusal.end
    bounds = f"must be below {end}" if least == 0 else f"must be from {least} to {end - 1}"
    name = _INDICES[refusal.what]
    raise IndexError(f"index out of range: {name} {refusal.value}, {bounds} (at {refusal.at})")
