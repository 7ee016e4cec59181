"""PTX operands as functions of the machine, and the table of opcodes that other modules fill."""

import re
import struct
from collections.abc import Callable

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import UNSIGNED, Array, Type, decode

Read = Callable[[Machine], Array]
Write = Callable[[Machine, Array], None]
Builder = Callable[[Instruction, Program], Step]

OPCODES: dict[str, Builder] = {}
"""By the part before the first dot."""


def opcode(*names: str) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        OPCODES.update(dict.fromkeys(names, builder))
        return builder

    return add


def unknown(instruction: Instruction) -> NotImplementedError:
    return NotImplementedError(f"opcode {'.'.join(instruction.opcode)} in: {instruction.text}")


_SPECIAL: dict[str, Read] = {
    "%tid.x": lambda machine: machine.threads,
    "%laneid": lambda machine: machine.threads & np.uint32(31),
    "%warpid": lambda machine: machine.threads >> np.uint32(5),
    "%ntid.x": lambda machine: np.array(machine.program.num_threads, np.uint32),
    "%ctaid.x": lambda machine: (machine.cta_ids % machine.grid[0]).astype(np.uint32),
    "%ctaid.y": lambda machine: (machine.cta_ids // machine.grid[0] % machine.grid[1]).astype(
        np.uint32
    ),
    "%ctaid.z": lambda machine: (machine.cta_ids // (machine.grid[0] * machine.grid[1])).astype(
        np.uint32
    ),
    "%nctaid.x": lambda machine: np.array(machine.grid[0], np.uint32),
    "%nctaid.y": lambda machine: np.array(machine.grid[1], np.uint32),
    "%nctaid.z": lambda machine: np.array(machine.grid[2], np.uint32),
    **dict.fromkeys(
        ("%tid.y", "%tid.z", "%cluster_ctarank", "global_smem"), lambda _: np.array(0, np.uint32)
    ),
    **dict.fromkeys(("%ntid.y", "%ntid.z", "%cluster_nctarank"), lambda _: np.array(1, np.uint32)),
}


def reader(operand: str, program: Program, kind: Type) -> Read:
    """Reads a register or a constant as the unsigned integers of a type's width."""
    dtype = kind.dtype
    if operand in program.registers:
        if UNSIGNED[program.registers[operand]] is dtype:
            return lambda machine: machine.registers[operand]
        return lambda machine: machine.registers[operand].astype(dtype)
    if operand in _SPECIAL:
        special = _SPECIAL[operand]
        return lambda machine: special(machine).astype(dtype)
    constant = np.array(_constant(operand, kind)).astype(dtype)
    return lambda _: constant


def _constant(operand: str, kind: Type) -> np.generic:
    if operand[:2] in ("0f", "0F", "0d", "0D"):
        value = int(operand[2:], 16)
        if operand[1] in "fF" and kind.bits == 64:
            value = struct.unpack("<Q", struct.pack("<d", _single(value)))[0]
        elif operand[1] in "dD" and kind.bits == 32:
            double = struct.unpack("<d", struct.pack("<Q", value))[0]
            value = struct.unpack("<I", struct.pack("<f", double))[0]
    else:
        value = int(operand.rstrip("U"), 0)
    if kind.name == "pred":
        return np.bool_(value != 0)
    return np.uint64(value & 0xFFFFFFFFFFFFFFFF)


def _single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def number(operand: str, program: Program, kind: Type) -> Read:
    """`reader` of the numbers that the bits stand for."""
    bits = reader(operand, program, kind)
    return lambda machine: decode(bits(machine), kind)


def writer(operand: str, program: Program) -> Write:
    """Writes unsigned integers to a register, filled up with zeros; to ``_`` nothing."""
    if operand == "_":
        return lambda machine, bits: None
    if operand not in program.registers:
        raise NotImplementedError(f"{operand} is no register that was declared")
    return lambda machine, bits: machine.put(operand, bits)


def vector(operand: str) -> list[str]:
    """The registers between braces, or the one without."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def address(operand: str, program: Program, kind: Type) -> Read:
    """``[register + constant]``; without brackets too, as `ldmatrix` and others have it."""
    match = re.fullmatch(r"\[?\s*([%$\w@]+)\s*(?:\+\s*(-?\w+))?\s*\]?", operand)
    if match is None:
        raise NotImplementedError(f"address {operand}")
    base = reader(match[1], program, kind)
    offset = np.array(int(match[2] or "0", 0) & ((1 << kind.bits) - 1)).astype(kind.dtype)
    if not offset:
        return base
    return lambda machine: base(machine) + offset
