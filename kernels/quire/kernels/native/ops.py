"""Translates a program into the native library's array of operations.

Operations that the library does not support, and unknown kinds of operations, are refused by name.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.kernels.native import abi as native_abi
from quire.kernels.native.abi import PARTIAL
from quire.kernels.native.adapters import AdaptedLayer
from quire.kernels.native.check import NotNative, check_heads, norm_pointer, pointer
from quire.kernels.native.experts import NativeExperts, route_op
from quire.kernels.native.int8 import Int8Linear
from quire.kernels.native.linear import NativeLinear
from quire.kernels.ops import (
    Activate,
    Add,
    AllReduce,
    Attend,
    Embed,
    GatedLinear,
    Gather,
    Linear,
    LinearLayer,
    Logits,
    MixExperts,
    Norm,
    Op,
    Program,
    RotaryTable,
    RotateAndWrite,
    Value,
)
from quire.kernels.rewrites import fuse_linear_add
from quire.kernels.torch.experts import Expert

MAX_COLUMNS = 1 << 24
"""The LM head's limit: columns are passed as float32, which is exact for integers up to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """Numbers and size of attention heads, the same in every layer; counts are per rank."""

    num_heads: int
    num_kv_heads: int
    head_size: int


class NativeOps:
    """The library's operations, and their requirements of working memory."""

    def __init__(self, program: Program) -> None:
        """Keeps the program's weights alive.

        Raises:
            NotNative: The library does not support ``program``.
            ValueError: The program's weights do not fit each other.
        """
        self._program = program
        self.ops: list[ctypes.Structure] = []
        self.caches: list[tuple[int, int]] = []
        """Indices of operations that use a KV cache, each with the cache's index."""
        self.ends: list[tuple[int, int, int]] = []
        """Indices before which a buffer is all-reduced, the buffer, and its values per token."""
        self.widths: dict[int, int] = {}
        """The widths of the buffers in use, in elements."""
        self.adapted: dict[str, AdaptedLayer] = {}
        """Layers that adapters may change, by name."""
        self.quantized: list[Int8Linear] = []
        """Layers that take their input in int8."""
        self.quantized_rows = 1
        """The most int8 input rows that a token has at once."""
        ops = fuse_linear_add(program)
        self.dtype = next(op.weight_VC.dtype for op in ops if isinstance(op, Embed))
        if self.dtype not in native_abi.DTYPES:
            raise NotNative(f"dtype {self.dtype}")
        self.heads = _heads(ops)
        self.num_positions = min(len(table.cos_PR) for table in _tables(ops))
        self._channels: dict[Value, int] = {}  # of the values computed so far
        self._summed: Value | None = None  # the value that is all-reduced in `PARTIAL`
        for before, op, after in zip((None, *ops), ops, (*ops[1:], None), strict=False):
            self._add(op, before, after)
        _check_end(ops)
        if self.num_columns >= MAX_COLUMNS:
            raise ValueError(f"{self.num_columns} columns: float32 holds numbers to {MAX_COLUMNS}")

    def _add(self, op: Op, before: Op | None, after: Op | None) -> None:
        match op:
            case Embed():
                self.vocab_size, width = op.weight_VC.shape
                weight = pointer("embedding", op.weight_VC, self.dtype, self.vocab_size, width)
                self._append(native_abi.EmbedOp(weight=weight, out=self._put(op.out, width)))
            case Norm():
                self._norm(op, is_sampled=isinstance(before, Gather))
            case Linear(adds=False) if isinstance(after, AllReduce) and after.x == op.out:
                self._linear(op, is_partial=True)
            case Linear() | GatedLinear():
                self._linear(op)
            case RotateAndWrite():
                self._rotate_and_write(op)
            case Attend():
                width = self.heads.num_heads * self.heads.head_size
                attend = native_abi.AttendOp(
                    x=self._get(op.x),
                    out=self._put(op.out, width),
                    **native_abi.attention_fields(op.scale, op.options, self.heads.num_heads),
                )
                self._append(attend, kv=op.kv)
            case MixExperts():
                self._mix_experts(op)
            case Activate():
                self._append(native_abi.GeluOp(x=self._read(op, op.x)))
            case AllReduce():
                if op.x != self._summed:
                    raise NotNative(f"AllReduce.x={op.x!r} that no layer wrote before it")
                width = self.widths[PARTIAL]
                self.ends.append((len(self.ops), PARTIAL, width))
                bias = None
                if op.bias_C is not None:
                    bias = pointer("a sum's bias", op.bias_C, self.dtype, width)
                out = self._put(op.x, width)
                self._append(native_abi.RoundPartialOp(bias=bias, out=out))
            case Add():
                x, to = self._read(op, op.x), self._read(op, op.to)
                if self._channels[op.x] != self._channels[op.to]:
                    raise ValueError(
                        f"{op.x!r} of {self._channels[op.x]} channels: must be "
                        f"{self._channels[op.to]}"
                    )
                self._append(native_abi.AddOp(x=x, to=to, scale=op.scale))
            case Logits():
                packed = self._packed(op.name, op.layer, x=op.x, is_gated=False)
                self.num_columns = packed.num_out
                self._quantize(packed, op.x)
                logits = native_abi.LogitsOp(
                    weights=ctypes.pointer(packed.weights),
                    x=self._get(op.x),
                    scale=op.scale,
                    cap=op.cap or 0.0,
                )
                self._append(logits)
            case Gather():
                pass  # The norm after it handles this.
            case _:
                raise NotNative(f"operation {type(op).__name__}")

    def _append(self, op: ctypes.Structure, *, kv: int | None = None) -> None:
        if kv is not None:
            self.caches.append((len(self.ops), kv))
        self.ops.append(op)

    def _get(self, value: Value) -> int:
        buffer = native_abi.BUFFERS.get(value)
        if buffer is None:
            raise NotNative(f"value {value!r}")
        return buffer

    def _read(self, op: Op, value: Value) -> int:
        if value not in self._channels:
            raise NotNative(f"{type(op).__name__} of {value!r} that nothing wrote before it")
        return self._get(value)

    def _put(self, value: Value, width: int) -> int:
        buffer = self._get(value)
        self._channels[value] = width
        self._widen(buffer, width)
        return buffer

    def _widen(self, buffer: int, width: int) -> None:
        self.widths[buffer] = max(self.widths.get(buffer, 0), width)

    def _norm(self, op: Norm, *, is_sampled: bool) -> None:
        buffer = self._read(op, op.x)
        width = self._channels[op.x]
        shape = (op.kind, self.dtype, width)
        self._append(
            native_abi.NormOp(
                weight=norm_pointer("a norm's weight", op.weight_C, *shape),
                bias=None if op.bias_C is None else norm_pointer("its bias", op.bias_C, *shape),
                x=buffer,
                out=self._put(op.out, width),
                is_sampled=is_sampled,
                eps=op.eps,
                norm_kind=native_abi.NORM_KINDS[op.kind],
            )
        )

    def _linear(self, op: Linear | GatedLinear, *, is_partial: bool = False) -> None:
        is_gated = isinstance(op, GatedLinear)
        packed = self._packed(op.name, op.layer, x=op.x, is_gated=is_gated)
        if isinstance(op, Linear) and op.adds:
            mode, out = native_abi.ADD, self._get(op.out)
            width = self._channels[op.out]
            if packed.num_out != width:
                raise ValueError(f"{op.name} of {packed.num_out} outputs: must be {width}")
        elif is_partial:
            mode, out = native_abi.STORE_F32, PARTIAL
            self.widths[PARTIAL], self._summed = packed.num_out, op.out
        else:
            mode = packed.mode
            out = self._put(op.out, packed.num_out)
        # The sum over the ranks follows.
        kinds = ("linear", "round_partial") if is_partial else ("linear",)
        self.adapted[op.name] = AdaptedLayer(
            layer=packed,
            fields=tuple(
                (len(self.ops) + i, kind, "adapters", "rank") for i, kind in enumerate(kinds)
            ),
        )
        self._append(
            native_abi.LinearOp(
                quantizes=self._quantize(packed, op.x),
                weights=ctypes.pointer(packed.weights),
                mode=mode,
                x=self._get(op.x),
                out=out,
            )
        )

    def _quantize(self, packed: NativeLinear, x: Value) -> bool:
        """Makes the norm before a layer output int8; returns whether the layer must quantise its
        input itself instead."""
        if not isinstance(packed, Int8Linear):
            return False
        self.quantized.append(packed)
        before = self.ops[-1]
        if isinstance(before, native_abi.NormOp) and before.out == self._get(x):
            before.next = ctypes.pointer(packed.weights)
            return False
        return True

    def _mix_experts(self, op: MixExperts) -> None:
        """Adds the operations of a mixture: router, choice, experts and the sum of results."""
        router, x = op.router, self._read(op, op.x)
        channels = self._channels[op.x]
        scores = self._packed("router", router.layer, x=op.x, is_gated=False)
        if isinstance(scores, Int8Linear):
            raise NotNative("router in int8")
        if scores.num_out != router.num_scores:
            raise ValueError(f"router of {scores.num_out} outputs: must be {router.num_scores}")
        experts = NativeExperts(op, dtype=self.dtype, num_channels=channels)
        places = experts.places
        for which, width in (
            *((native_abi.SCORES, scores.num_out), (native_abi.CHOSEN, router.top_k)),
            *((native_abi.SHARES, places), (native_abi.PLACES, places)),
            *((native_abi.GATHERED, places * channels), (native_abi.RESULTS, places * channels)),
            (native_abi.INNER, experts.inner),
        ):
            self._widen(which, width)
        if experts.quantized:
            self.quantized += experts.quantized
            self.quantized_rows = max(self.quantized_rows, places)
        weights, mode = ctypes.pointer(scores.weights), native_abi.STORE_F32
        linear = native_abi.LinearOp(weights=weights, mode=mode, x=x, out=native_abi.SCORES)
        for each in (linear, route_op(router), experts.op(x)):
            self._append(each)
        if op.shared is not None:
            self._adapt_shared(op, op.shared)
        if op.is_split:
            self.ends.append((len(self.ops), native_abi.RESULTS, places * channels))
        bias = None
        if op.bias_EC is not None:
            shape = (router.num_experts, channels)
            bias = pointer("biases of experts", op.bias_EC, torch.float32, *shape)
        out = self._put(op.out, channels)
        mix = native_abi.MixOp(bias=bias, top_k=router.top_k, num_places=places, out=out)
        self._append(mix)

    def _adapt_shared(self, op: MixExperts, shared: Expert) -> None:
        """Adds the shared expert's adapters, between the experts' operation and their sum."""
        place = len(self.ops) - 1
        ends = [(place, "experts", "down_adapters", "down_rank")]
        ends += [(place + 1, "mix", "adapters", "rank")] if op.is_split else []
        for name, layer, fields in (
            ("gate_up", shared.up, [(place, "experts", "up_adapters", "up_rank")]),
            ("down", shared.down, ends),
        ):
            assert isinstance(layer, NativeLinear)
            self.adapted[f"{op.name}.shared.{name}"] = AdaptedLayer(
                layer=layer, fields=tuple(fields)
            )

    def _packed(self, name: str, layer: LinearLayer, *, x: Value, is_gated: bool) -> NativeLinear:
        if not isinstance(layer, NativeLinear):
            raise NotNative(f"{name}, a {type(layer).__name__}")
        found = (layer.dtype, layer.weights.num_in, bool(layer.weights.gated))
        wanted = (self.dtype, self._channels[x], is_gated)
        if found != wanted:
            raise ValueError(f"{name}, of (type, inputs, gated) {found}: must be {wanted}")
        return layer

    def _rotate_and_write(self, op: RotateAndWrite) -> None:
        shape = self.heads
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
        if self._channels[op.x] != width:
            raise ValueError(f"{op.x!r} of {self._channels[op.x]} channels: must be {width}")
        if self._put(op.out, width) != self._get(op.x):
            raise NotNative(f"RotateAndWrite.out={op.out!r}: Q stays where K and V are")
        num_positions = len(op.table.cos_PR)
        rotated = (torch.float32, num_positions, shape.head_size // 2)
        counts = [1, 1]
        if op.q_norm_D is not None and len(op.q_norm_D) > shape.head_size:
            counts = [shape.num_heads, shape.num_kv_heads]
        norms = [
            None
            if x is None
            else norm_pointer("a head's norm", x, op.kind, self.dtype, count * shape.head_size)
            for x, count in zip((op.q_norm_D, op.k_norm_D), counts, strict=True)
        ]
        rotate = native_abi.RotateAndWriteOp(
            q_norm=norms[0],
            k_norm=norms[1],
            eps=op.eps,
            norm_kind=native_abi.NORM_KINDS[op.kind],
            norms_all_heads=counts != [1, 1],
            cos=pointer("cos", op.table.cos_PR, *rotated),
            sin=pointer("sin", op.table.sin_PR, *rotated),
            x=self._get(op.x),
        )
        if op.q_scale_P is not None:
            rotate.q_scale = pointer("scales of Q", op.q_scale_P, self.dtype, num_positions)
        self._append(rotate, kv=op.kv)


def _check_end(ops: Program) -> None:
    """Checks that only the last norm and the LM head work on the sampled rows."""
    kinds = [type(op) for op in ops]
    same = getattr(ops[-3], "x", None) == getattr(ops[-2], "x", None)
    if kinds[-3:] != [Gather, Norm, Logits] or not same or kinds.count(Gather) != 1:
        raise NotNative(f"end {', '.join(kind.__name__ for kind in kinds[-3:])}")


def _heads(ops: Program) -> HeadShape:
    """The heads of all layers. Raises NotNative: layers differ."""
    shapes = {
        HeadShape(num_heads=op.num_heads, num_kv_heads=op.num_kv_heads, head_size=op.head_size)
        for op in ops
        if isinstance(op, RotateAndWrite)
    }
    if len(shapes) != 1:
        raise NotNative(f"layers of unlike heads: {shapes}")
    (shape,) = shapes
    check_heads(shape.num_heads, shape.num_kv_heads)
    if not can_attend(shape.head_size):
        raise NotNative(f"RotateAndWrite.head_size={shape.head_size}")
    return shape


def can_attend(head_size: int) -> bool:
    return head_size % 16 == 0 and head_size <= 256


def _tables(ops: Program) -> Iterator[RotaryTable]:
    return (op.table for op in ops if isinstance(op, RotateAndWrite))
