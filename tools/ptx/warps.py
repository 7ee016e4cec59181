"""PTX instructions across the 32 threads of a warp: shuffles, reductions and votes."""

from collections.abc import Callable

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.operands import number, opcode, reader, unknown, writer
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import Array, encode, type_of

_LANES = np.arange(32, dtype=np.int64)


def _check_members(operand: str, instruction: Instruction) -> None:
    if not operand.startswith("%") and int(operand, 0) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise unknown(instruction)


@opcode("shfl")
def _shuffle(instruction: Instruction, program: Program) -> Step:
    mode = instruction.opcode[2]
    _check_members(instruction.operands[4], instruction)
    targets = [name.strip() for name in instruction.operands[0].split("|")]
    writes = [writer(name, program) for name in targets]
    kind = type_of("b32")
    values, by, limits = (reader(one, program, kind) for one in instruction.operands[1:4])

    def step(machine: Machine) -> None:
        machine.whole_warps()
        value = machine.lanes(values(machine)).reshape(-1, 32)
        distance = machine.lanes(by(machine)).reshape(-1, 32).astype(np.int64) & 31
        limit = machine.lanes(limits(machine)).reshape(-1, 32).astype(np.int64)
        segment = (limit >> 8) & 31
        highest = (_LANES & segment) | (limit & 31 & ~segment)
        lowest = _LANES & segment
        if mode == "up":
            source = _LANES - distance
            inside = source >= highest
        elif mode == "down":
            source = _LANES + distance
            inside = source <= highest
        elif mode == "bfly":
            source = _LANES ^ distance
            inside = source <= highest
        else:
            source = lowest | (distance & ~segment)
            inside = source <= highest
        source = np.where(inside, source, _LANES)
        writes[0](machine, np.take_along_axis(value, source, 1).reshape(-1))
        if len(writes) > 1:
            writes[1](machine, np.ascontiguousarray(inside).reshape(-1))

    return step


_REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "add": lambda rows: rows.sum(1, dtype=rows.dtype),
    "min": lambda rows: rows.min(1),
    "max": lambda rows: rows.max(1),
    "and": lambda rows: np.bitwise_and.reduce(rows, 1),
    "or": lambda rows: np.bitwise_or.reduce(rows, 1),
    "xor": lambda rows: np.bitwise_xor.reduce(rows, 1),
}


@opcode("redux")
def _reduce(instruction: Instruction, program: Program) -> Step:
    _check_members(instruction.operands[2], instruction)
    kind = type_of(instruction.opcode[-1])
    if len(instruction.opcode) != 4:
        raise unknown(instruction)
    write = writer(instruction.operands[0], program)
    values = number(instruction.operands[1], program, kind)
    function = _REDUCTIONS[instruction.opcode[2]]

    def step(machine: Machine) -> None:
        machine.whole_warps()
        result = function(machine.lanes(values(machine)).reshape(-1, 32))
        write(machine, encode(np.repeat(result, 32), kind))

    return step


@opcode("vote")
def _vote(instruction: Instruction, program: Program) -> Step:
    mode = instruction.opcode[2]
    _check_members(instruction.operands[2], instruction)
    write = writer(instruction.operands[0], program)
    operand = instruction.operands[1]
    read = reader(operand.lstrip("!"), program, type_of("pred"))

    def step(machine: Machine) -> None:
        machine.whole_warps()
        votes = machine.lanes(read(machine)).reshape(-1, 32) ^ operand.startswith("!")
        if mode == "ballot":
            result = (votes.astype(np.uint64) << _LANES.astype(np.uint64)).sum(1).astype(np.uint32)
        elif mode == "any":
            result = votes.any(1)
        elif mode == "all":
            result = votes.all(1)
        else:
            result = votes.all(1) | ~votes.any(1)
        write(machine, np.repeat(result, 32))

    return step


@opcode("activemask")
def _active(instruction: Instruction, program: Program) -> Step:
    write = writer(instruction.operands[0], program)

    def step(machine: Machine) -> None:
        active = np.ones(machine.num_lanes, np.bool_) if machine.active is None else machine.active
        rows = active.reshape(-1, 32).astype(np.uint64) << _LANES.astype(np.uint64)
        write(machine, np.repeat(rows.sum(1).astype(np.uint32), 32))

    return step


@opcode("elect")
def _elect(instruction: Instruction, program: Program) -> Step:
    """The first thread of a warp."""
    leader, chosen = (writer(name.strip(), program) for name in instruction.operands[0].split("|"))

    def step(machine: Machine) -> None:
        machine.whole_warps()
        leader(machine, np.array(0, np.uint32))
        chosen(machine, machine.threads % np.uint32(32) == 0)

    return step
