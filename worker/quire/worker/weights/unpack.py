"""Unpacks a rank's part of a quantised matrix, to codes with scales or to values.

The layouts are those of GPTQModel, AutoAWQ, compressed-tensors and ModelOpt. Several integers are
packed into 32 bits, the first in the lowest bits. GPTQ and compressed-tensors pack along the
inputs. AWQ packs along the outputs, in its own order. Packed zero points are always along outputs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.grouped import LINE, ZERO, GroupedWeight
from quire.worker.weights.stored import StoredFormat

# O, I a linear layer's output and input   G groups of inputs   P integers in 32 bits

Bounds = tuple[int, int]
Take = Callable[..., Tensor]
"""``take(suffix, dtype, *shapes, rows, columns)``: a tensor of the module, of one of these shapes,
or a part of it."""


class UnpackError(Exception):
    """Stored values are invalid; the message says which."""


MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_OF_BYTE = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])
"""For each byte, its two 4-bit values (E2M1), the first from the low half."""
_OF_EXPONENT = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), math.nan])
"""The power of two that each byte stands for (E8M0). 255 is NaN."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(
    stored: StoredFormat,
    take: Take,
    shape: tuple[int, int],
    rows: Bounds,
    columns: Bounds,
    *,
    dtype: torch.dtype,
) -> Tensor | GroupedWeight:
    """The part ``rows`` by ``columns`` of a matrix of ``shape``.

    It stays in groups of 4-bit codes if it is stored like that; else it is float32.
    """
    code_OI = _codes(stored, take, shape, rows, columns)
    group = stored.block[1] or shape[1]
    column_I = torch.arange(*columns) // group
    num_groups = math.ceil(shape[1] / group)
    if stored.order is not None:
        order_I = take(stored.order, "I32", (shape[1],), rows=columns).long()
        # compressed-tensors stores -1 if it kept the order.
        is_kept = stored.layout == "packed" and bool((order_I == -1).any())
        if not is_kept and not torch.equal(order_I, column_I) and order_I.numel():
            _check_order(stored.order, order_I, num_groups)
            column_I = order_I
    scale_OG = _scales(stored, take, shape, rows, num_groups)
    zero_OG = _zeros(stored, take, shape, rows, num_groups)
    step = math.gcd(group, columns[0], columns[1] - columns[0])
    first_I = column_I[::step]
    if (
        stored.bits == 4
        and stored.layout != "float4"
        and step % LINE == 0
        and torch.equal(first_I.repeat_interleave(step), column_I)
    ):
        is_centred = zero_OG is None or bool((zero_OG == ZERO).all())
        return GroupedWeight(
            code_OI=code_OI,
            scale_OG=scale_OG[:, first_I],
            zero_OG=None if zero_OG is None or is_centred else zero_OG[:, first_I].byte(),
            dtype=dtype,
        )
    levels_OI = code_OI.float()
    if zero_OG is not None:
        levels_OI -= zero_OG[:, column_I]
    elif stored.layout in ("packed", "q4_0"):
        levels_OI -= 1 << (stored.bits - 1)
    return levels_OI * scale_OG[:, column_I]


def decode_mxfp4(blocks_OGB: Tensor, scales_OG: Tensor) -> Tensor:
    """Decodes the OCP's MXFP4 to float32 ``[O, I]``. 32 inputs share a power of two as scale; two
    inputs share a byte, the first in its low half. A scale of 255 is NaN."""
    values_OGL = _OF_BYTE[blocks_OGB.int()].flatten(2)
    return (values_OGL * _OF_EXPONENT[scales_OG.int()][..., None]).flatten(1)


def _codes(
    stored: StoredFormat, take: Take, shape: tuple[int, int], rows: Bounds, columns: Bounds
) -> Tensor:
    """The codes ``[O, I]``: uint8, or the stored values if they are not packed into 32 bits."""
    num_out, num_in = shape
    per_int = 32 // stored.bits
    if stored.layout == "gptq":
        covering, inner = _covering(columns, per_int)
        packed = take("qweight", "I32", (num_in // per_int, num_out), rows=covering, columns=rows)
        return _integers(packed.T, stored.bits)[:, inner]
    if stored.layout == "awq":
        covering, inner = _covering(rows, per_int)
        packed = take(
            "qweight", "I32", (num_in, num_out // per_int), rows=columns, columns=covering
        )
        return _awq_integers(packed)[:, inner].T.contiguous()
    if stored.layout == "packed":
        covering, inner = _covering(columns, per_int)
        width = math.ceil(num_in / per_int)
        packed = take("weight_packed", "I32", (num_out, width), rows=rows, columns=covering)
        return _integers(packed, stored.bits)[:, inner]
    if stored.layout == "float4":
        covering, inner = _covering(columns, 2)
        packed = take(stored.codes, "U8", (num_out, num_in // 2), rows=rows, columns=covering)
        return _OF_BYTE[packed.int()].flatten(1)[:, inner]
    if stored.layout == "q4_0":
        return take("codes", "U8", shape, rows=rows, columns=columns)
    kind = "I8" if stored.layout == "int8" else "F8_E4M3"
    return take("weight", kind, shape, rows=rows, columns=columns)


def _scales(
    stored: StoredFormat, take: Take, shape: tuple[int, int], rows: Bounds, num_groups: int
) -> Tensor:
    """The scales: float32 ``[O, G]``, checked to be finite."""
    if stored.layout in ("gptq", "awq"):
        return take(stored.scale, "float", (num_groups, shape[0]), columns=rows).T.float()
    block = stored.block[0] or shape[0]
    num_blocks = math.ceil(shape[0] / block)
    accepted: list[tuple[int, ...]] = [(num_blocks, num_groups)]
    if num_groups == 1:
        accepted += [(num_blocks,), ()] if num_blocks == 1 else [(num_blocks,)]
    scale = take(stored.scale, "U8" if stored.are_powers else "float", *accepted)
    scale = (_powers(scale) if stored.are_powers else scale.float()).view(num_blocks, num_groups)
    if stored.global_scale is not None:
        whole = take(stored.global_scale, "float", (), (1,)).float()
        scale = scale / whole if stored.divides else scale * whole
    return scale[torch.arange(*rows) // block]


def _powers(exponents: Tensor) -> Tensor:
    if bool((exponents == 255).any()):
        raise UnpackError("a scale is 255, which stands for NaN: get a sound copy")
    return _OF_EXPONENT[exponents.int()]


def _zeros(
    stored: StoredFormat, take: Take, shape: tuple[int, int], rows: Bounds, num_groups: int
) -> Tensor | None:
    """Zero points ``[O, G]`` in units of the codes; ``None`` if there are none."""
    if stored.symmetric:
        return None
    per_int, bits = 32 // stored.bits, stored.bits
    covering, inner = _covering(rows, per_int)
    width = math.ceil(shape[0] / per_int)
    if stored.layout == "awq":
        packed = take("qzeros", "I32", (num_groups, width), columns=covering)
        return _awq_integers(packed)[:, inner].T
    if stored.layout == "gptq":
        # Added to the packed 32 bits, as it was subtracted: a 0 borrowed from its neighbour.
        ones = stored.zero_offset * sum(1 << shift for shift in range(0, 32, bits))
        packed = take("qzeros", "I32", (num_groups, width), columns=covering) + ones
        return _integers(packed, bits)[:, inner].T
    if stored.layout == "packed":
        packed = take("weight_zero_point", "I32", (width, num_groups), rows=covering)
        return _integers(packed.T, bits)[:, inner].T
    zero = take("weight_zero_point", "I8", (shape[0], num_groups), (shape[0],))
    return zero.view(shape[0], num_groups)[slice(*rows)]


def _covering(bounds: Bounds, per_int: int) -> tuple[Bounds, slice]:
    """The range of 32-bit words that hold the integers ``bounds``, and their slice in it."""
    first, last = bounds[0] // per_int, math.ceil(bounds[1] / per_int)
    start = bounds[0] - first * per_int
    return (first, last), slice(start, start + bounds[1] - bounds[0])


def _integers(packed: Tensor, bits: int) -> Tensor:
    """Unpacks int32 ``[..., n]`` to uint8 ``[..., P n]``."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _awq_integers(packed: Tensor) -> Tensor:
    in_order = _integers(packed, 4).view(len(packed), -1, 8)[..., list(_AWQ_ORDER)]
    return in_order.flatten(1)


def _check_order(name: str, order_I: Tensor, num_groups: int) -> None:
    if int(order_I.min()) < 0 or int(order_I.max()) >= num_groups:
        raise UnpackError(
            f"{name} has values from {int(order_I.min())} to {int(order_I.max())}; of "
            f"{num_groups} groups they are 0 to {num_groups - 1}: get a sound copy"
        )
