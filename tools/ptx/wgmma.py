"""PTX's `wgmma`: matrix products of four warps, with factors in shared memory.

A descriptor has a factor's address, two strides and a swizzle, as in "Matrix Descriptor" and
"Strides" of the PTX ISA. From a product's start until the wait for its group, the registers of its
sum hold NaN. Factors are read at the start, so a kernel that overwrites one too early is not
detected.
"""

import re
from dataclasses import dataclass

import numpy as np
from tools.ptx.machine import Fault, Machine, Step
from tools.ptx.matrix import elements, fragment
from tools.ptx.operands import Read, opcode, reader, unknown, vector
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import UNSIGNED, Array, Type, decode, encode, type_of

_NAN = np.array(0xFFFFFFFF, np.uint32)
_ASYNCHRONOUS = 0x8000
"""The number under which wgmma reads: no warp's, so that even the own needs a barrier."""
_SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""By a descriptor's last two bits: bytes of a row of its tile, and which of address bits 7 to 9
change bits 4 to 6."""


@dataclass
class _Sum:
    """The registers of one sum, while it is under way."""

    bits: Array
    """``[registers, lanes]``"""
    groups: Array
    flying: Array


class Products:
    def __init__(self, num_lanes: int) -> None:
        self._groups = np.zeros(num_lanes, np.int64)
        self._sums: dict[tuple[str, ...], _Sum] = {}

    def __bool__(self) -> bool:
        """Whether a product is under way."""
        return bool(self._sums)

    def keep(self, lanes: Array) -> None:
        """Forgets the other lanes; nothing is under way."""
        self._groups = self._groups[lanes]

    def so_far(self, machine: Machine, registers: tuple[str, ...]) -> Array:
        """What a product adds to: a sum that is under way, else the registers."""
        bits = np.stack([machine.lanes(machine.registers[name]) for name in registers])
        if registers in self._sums:
            return np.where(self._sums[registers].flying, self._sums[registers].bits, bits)
        return bits

    def start(self, machine: Machine, registers: tuple[str, ...], bits: Array) -> None:
        active = np.ones(machine.num_lanes, np.bool_) if machine.active is None else machine.active
        old = self._sums.get(registers)
        if old is None:
            self._sums[registers] = _Sum(bits, self._groups.copy(), active.copy())
        else:
            old.bits = np.where(active, bits, old.bits)
            old.groups = np.where(active, self._groups, old.groups)
            old.flying = old.flying | active
        for name in registers:
            machine.put(name, _NAN)

    def commit(self, active: Array | None) -> None:
        self._groups += 1 if active is None else active

    def wait(self, machine: Machine, limit: int) -> None:
        """Gives the active lanes all sums but those of their last ``limit`` groups."""
        for registers, sums in list(self._sums.items()):
            ready = sums.flying & (sums.groups < self._groups - limit)
            if machine.active is not None:
                ready &= machine.active
            for name, bits in zip(registers, sums.bits, strict=True):
                machine.registers[name] = np.where(ready, bits, machine.registers[name])
            sums.flying = sums.flying & ~ready
            if not sums.flying.any():
                del self._sums[registers]


@opcode("wgmma")
def _warp_group(instruction: Instruction, program: Program) -> Step:
    what = instruction.opcode[1]
    if what == "fence":
        return lambda machine: None
    if what == "commit_group":
        return lambda machine: machine.products.commit(machine.active)
    if what == "wait_group":
        limit = int(instruction.operands[0])
        return lambda machine: machine.products.wait(machine, limit)
    if what == "mma_async" and "sp" not in instruction.opcode:
        return _multiply(instruction, program)
    raise unknown(instruction)


def _multiply(instruction: Instruction, program: Program) -> Step:
    shape = next(filter(None, (re.fullmatch(r"m64n(\d+)k(\d+)", w) for w in instruction.opcode)))
    n, k = int(shape[1]), int(shape[2])
    d_type, a_type, b_type = (type_of(name) for name in instruction.opcode[-3:])
    d, a, b, adds, *flags = instruction.operands
    numbers = [int(flag, 0) for flag in flags]
    if a_type != b_type or d_type.bits != 32 or numbers[:2] not in ([1, 1], []):
        raise unknown(instruction)
    transposed = numbers[2:]
    sums = tuple(vector(d))
    b_read = reader(b, program, type_of("b64"))
    a_reads = [reader(name, program, type_of("b32" if "{" in a else "b64")) for name in vector(a)]
    is_adding = reader(adds, program, type_of("pred"))
    b_trans = bool(transposed and transposed[-1])
    a_trans = len(transposed) == 2 and bool(transposed[0])

    def step(machine: Machine) -> None:
        groups = _whole_groups(machine)
        right = _matrix(machine, b_read, groups, n, k, a_type, b_trans)
        if "{" in a:
            registers = [machine.lanes(read(machine)) for read in a_reads]
            tiles = elements(registers, a_type)[:, fragment(16, k, a_type.bits)]
            left = tiles.reshape(-1, 64, k)[groups]
        else:
            left = _matrix(machine, a_reads[0], groups, 64, k, a_type, a_trans)
        product = left.astype(np.float64) @ right.astype(np.float64).transpose(0, 2, 1)
        added = decode(machine.products.so_far(machine, sums), d_type) if _any(adds) else None
        bits = np.zeros((len(sums), machine.num_lanes), np.uint32)
        total = _registers(product, n)
        if added is not None:
            before = added.reshape(len(sums), -1, 128)[:, groups].reshape(len(sums), -1)
            plus = machine.lanes(is_adding(machine)).reshape(-1, 128)[groups].reshape(-1)
            total = total + np.where(plus, before, 0.0)
        bits.reshape(len(sums), -1, 128)[:, groups] = encode(total, d_type).reshape(
            len(sums), -1, 128
        )
        machine.products.start(machine, sums, bits)

    return step


def _any(adds: str) -> bool:
    """Whether a product may add to what its registers hold."""
    return adds.startswith("%") or int(adds, 0) != 0


def _whole_groups(machine: Machine) -> Array:
    """The warp groups that take part."""
    if machine.program.num_threads % 128:
        raise Fault("wgmma of a CTA that is no multiple of 128 threads")
    if machine.active is None:
        return np.arange(machine.num_lanes // 128)
    groups = machine.active.reshape(-1, 128)
    if (groups.any(1) != groups.all(1)).any():
        raise Fault("the four warps of a wgmma went apart")
    return np.flatnonzero(groups[:, 0])


def _matrix(
    machine: Machine, read: Read, groups: Array, rows: int, k: int, kind: Type, trans: bool
) -> Array:
    """``[groups, rows, k]`` numbers from where the groups' descriptors say.

    As it lies there: rows of ``width`` bytes, eight to a tile. Along them runs K, or, transposed,
    the other dimension.
    """
    described = machine.lanes(read(machine)).reshape(-1, 128)[groups]
    if (described != described[:, :1]).any():
        raise Fault("the threads of a wgmma disagree about a matrix descriptor")
    descriptor = described[:, 0].astype(np.int64)[:, None, None]
    width, swizzle = _swizzle(described[:, 0])
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> 16 & 0x3FFF) << 4), ((descriptor >> 32 & 0x3FFF) << 4)
    row = np.arange(rows)[:, None]
    column = np.arange(k)[None, :]
    size = kind.bits // 8
    if trans:
        along = width // size
        offset = row // along * leading + column // 8 * stride + column % 8 * width
        offset = offset + row % along * size
    else:
        inside = column * size
        offset = row // 8 * stride + row % 8 * width + inside % width + inside // width * leading
    address = start + offset
    address = address ^ (((address >> 7) & swizzle) << 4)
    ctas = machine.cta.reshape(-1, 128)[groups, :1][:, :, None]
    offsets = machine.shared.check(address, ctas, size)
    machine.shared.races.read(offsets, size, np.array(_ASYNCHRONOUS))
    return decode(machine.shared.bytes.view(UNSIGNED[kind.bits])[offsets // size], kind)


def _swizzle(descriptors: Array) -> tuple[int, int]:
    modes = np.unique(descriptors >> np.uint64(62))
    if len(modes) != 1:
        raise Fault("the groups of a wgmma swizzle differently")
    return _SWIZZLES[int(modes[0])]


def _registers(product: Array, n: int) -> Array:
    """``[groups, 64, n]`` as the registers of the threads hold it: ``[n / 2, groups * 128]``."""
    thread = np.arange(128)
    register = np.arange(n // 2)[:, None]
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    return np.asarray(product[:, row, column].transpose(1, 0, 2).reshape(n // 2, -1))
