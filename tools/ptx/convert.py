"""PTX's `cvt`: conversions between types of numbers, of pairs too, and to and from float8."""

from collections.abc import Callable

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.operands import opcode, reader, unknown, writer
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import SIGNED, Array, Type, decode, encode, join, split, type_of

_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@opcode("cvt")
def _convert(instruction: Instruction, program: Program) -> Step:
    *modifiers, target_name, source_name = instruction.opcode[1:]
    target, source = type_of(target_name), type_of(source_name)
    known = {"rn", "rna", "rz", "ftz", "satfinite", "relu", "sat", *_ROUNDINGS}
    if not known.issuperset(modifiers) or {"relu", "sat"} & set(modifiers):
        raise unknown(instruction)
    truncates = "rz" in modifiers
    if truncates and not (source.is_float and target.is_float and source.bits > target.bits):
        raise unknown(instruction)
    rounding = next((_ROUNDINGS[word] for word in modifiers if word in _ROUNDINGS), None)
    write = writer(instruction.operands[0], program)
    # A pair made of two registers has the second of them in its low half.
    reads = [reader(operand, program, source) for operand in instruction.operands[:0:-1]]
    if len(reads) * source.count != target.count:
        raise unknown(instruction)
    widest = program.registers.get(instruction.operands[0], 0)

    def step(machine: Machine) -> None:
        elements = [element for read in reads for element in split(read(machine), source)]
        converted = [
            _number(decode(element, source.element), source, target, rounding)
            for element in elements
        ]
        encoded = [encode(np.asarray(one), target.element) for one in converted]
        if truncates:
            encoded = [_not_larger(*pair, target) for pair in zip(encoded, converted, strict=True)]
        bits = join(encoded, target)
        if target.is_signed and widest > target.bits:  # a wider register gets the sign
            bits = decode(bits, target).astype(SIGNED[widest]).view()
        write(machine, bits)

    return step


def _not_larger(bits: Array, values: Array, target: Type) -> Array:
    """Where rounding to nearest went away from 0, the number before."""
    is_larger = np.abs(decode(bits, target.element)) > np.abs(values)
    return np.asarray(bits - is_larger.astype(bits.dtype))


def _number(
    values: Array, source: Type, target: Type, rounding: Callable[[Array], Array] | None
) -> Array:
    if rounding is not None:
        values = rounding(values)
    if target.is_float:
        return values.astype(np.float64) if target.bits == 64 or source.bits == 64 else values
    dtype = SIGNED[target.bits] if target.is_signed else target.dtype
    if not source.is_float:
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    wide = np.where(np.isnan(values), 0.0, values.astype(np.float64))
    # float64 has no 2^63 - 1: what is past it is set apart.
    whole = np.clip(wide, limits.min, np.nextafter(float(limits.max), 0)).astype(dtype)
    return np.where(wide >= float(limits.max), dtype(limits.max), whole)
