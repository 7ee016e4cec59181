"""PTX's `mma.sync`, `ldmatrix` and `stmatrix`: products of small matrices in a warp's registers.

Layouts are those of the PTX ISA, "Matrix Fragments for mma": with ``g = lane / 4`` and
``t = lane % 4``, a register of A holds neighbours along K of row ``g`` or ``g + 8``, one of B
those of column ``g``; the sum has columns ``2t`` and ``2t + 1``. Sums are float64, rounded once.
"""

import re
from functools import cache

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.operands import address, opcode, reader, unknown, vector, writer
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import UNSIGNED, Array, Type, decode, encode, type_of

_G, _T = np.divmod(np.arange(32), 4)


@opcode("mma")
def _multiply(instruction: Instruction, program: Program) -> Step:
    shape = re.fullmatch(r"m16n8k(\d+)", instruction.opcode[3])
    d_name, a_name, b_name, c_name = instruction.opcode[-4:]
    if shape is None or instruction.opcode[4:6] != ("row", "col") or a_name != b_name:
        raise unknown(instruction)
    if set(instruction.opcode[6:-4]) - {"satfinite"}:
        raise unknown(instruction)
    k = int(shape[1])
    factor, result = type_of(a_name), type_of(d_name)
    if d_name != c_name or result.bits != 32:
        raise unknown(instruction)
    word = type_of("b32")
    writes = [writer(name, program) for name in vector(instruction.operands[0])]
    a, b, c = (
        [reader(name, program, word) for name in vector(operand)]
        for operand in instruction.operands[1:4]
    )
    a_index, b_index = fragment(16, k, factor.bits), fragment(8, k, factor.bits)

    def step(machine: Machine) -> None:
        machine.whole_warps()
        left = elements([machine.lanes(read(machine)) for read in a], factor)[:, a_index]
        right = elements([machine.lanes(read(machine)) for read in b], factor)[:, b_index]
        product = left.astype(np.float64) @ right.astype(np.float64).transpose(0, 2, 1)
        for number, (write, read) in enumerate(zip(writes, c, strict=True)):
            added = decode(machine.lanes(read(machine)), result).reshape(-1, 32)
            total = product[:, _G + 8 * (number // 2), 2 * _T + number % 2] + added
            write(machine, encode(total.reshape(-1), result))

    return step


def elements(registers: list[Array], kind: Type) -> Array:
    """The elements of each warp's fragment registers: ``[warps, registers * 32 * parts]``."""
    words = np.stack([bits.reshape(-1, 32) for bits in registers], axis=1)
    return decode(words.reshape(len(words), -1).view(UNSIGNED[kind.bits]), kind)


@cache
def fragment(rows: int, k: int, bits: int) -> Array:
    """Where in `elements` the matrix ``[rows, k]`` has its own; rows beyond 8 alternate with the
    first 8 in the registers, as those of A do."""
    parts = 32 // bits
    row, column = np.meshgrid(np.arange(rows), np.arange(k), indexing="ij")
    register = column // (4 * parts) * (rows // 8) + row // 8
    lane = row % 8 * 4 + column // parts % 4
    return np.asarray((register * 32 + lane) * parts + column % parts)


@opcode("ldmatrix")
def _load_matrix(instruction: Instruction, program: Program) -> Step:
    _check_shape(instruction)
    is_transposed = "trans" in instruction.opcode
    writes = [writer(name, program) for name in vector(instruction.operands[0])]
    where = address(instruction.operands[1], program, type_of("u32"))

    def step(machine: Machine) -> None:
        warps = machine.whole_warps()
        offsets, readers = _rows(machine, where(machine), warps, len(writes))
        for number, write in enumerate(writes):
            rows = offsets[:, 8 * number : 8 * number + 8]
            words = np.stack(machine.shared.load(rows, 16, 4, readers), axis=2)
            if is_transposed:
                halves = np.ascontiguousarray(words).view(np.uint16)
                words = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32)
            write(machine, _all_warps(words.reshape(-1, 32), warps))

    return step


@opcode("stmatrix")
def _store_matrix(instruction: Instruction, program: Program) -> Step:
    _check_shape(instruction)
    is_transposed = "trans" in instruction.opcode
    reads = [reader(name, program, type_of("b32")) for name in vector(instruction.operands[1])]
    where = address(instruction.operands[0], program, type_of("u32"))

    def step(machine: Machine) -> None:
        warps = machine.whole_warps()
        offsets, writers = _rows(machine, where(machine), warps, len(reads))
        for number, read in enumerate(reads):
            words = machine.lanes(read(machine)).reshape(-1, 8, 4)
            words = words if warps is None else words[warps]
            if is_transposed:
                halves = np.ascontiguousarray(words).view(np.uint16)
                words = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32)
            rows = offsets[:, 8 * number : 8 * number + 8]
            columns = [words[:, :, place] for place in range(4)]
            machine.shared.store(rows, 16, columns, writers)

    return step


def _check_shape(instruction: Instruction) -> None:
    if "m8n8" not in instruction.opcode or instruction.opcode[-1] != "b16":
        raise unknown(instruction)


def _rows(
    machine: Machine, addresses: Array, warps: Array | None, count: int
) -> tuple[Array, Array]:
    """Offsets in shared memory of the rows that the first ``8 * count`` threads of each warp
    name, and the warp's number, of the warps that take part."""
    named = machine.lanes(addresses).reshape(-1, 32)[:, : 8 * count]
    ctas = machine.cta.reshape(-1, 32)[:, : 8 * count]
    numbers = machine.warps.reshape(-1, 32)[:, :1]
    if warps is not None:
        named, ctas, numbers = named[warps], ctas[warps], numbers[warps]
    return machine.shared.check(np.ascontiguousarray(named), ctas, 16), numbers


def _all_warps(words: Array, warps: Array | None) -> Array:
    if warps is None:
        return words.reshape(-1)
    whole = np.zeros((len(warps), 32), words.dtype)
    whole[warps] = words
    return whole.reshape(-1)
