"""PTX's arithmetic, comparison and bit instructions, which work on each lane separately.

Approximations (`ex2.approx`, `rcp.approx`, `div.full`) give the nearest float32. A fused
multiply-add is rounded twice where the sum of an exact product and a float32 does not fit float64,
which is rarer than one in 2^28.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.operands import Read, number, opcode, reader, unknown, writer
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import Array, Type, decode, encode, join, on_elements, split, type_of

Function = Callable[..., Array]


def _fused(a: Array, b: Array, c: Array) -> Array:
    if a.dtype.kind == "f":
        sums: Array = a.astype(np.float64) * b + c
        return sums.astype(a.dtype)
    return np.asarray(a * b + c)


def _quotient(a: Array, b: Array) -> Array:
    """Integer quotient, rounded towards 0; a division by 0 gives an unspecified result."""
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    b = np.where(b == 0, b.dtype.type(1), b)
    whole: Array = a // b
    if a.dtype.kind == "i":
        whole = whole + ((a % b != 0) & ((a < 0) != (b < 0)))
    return np.asarray(whole)


def _remainder(a: Array, b: Array) -> Array:
    return np.asarray(a - _quotient(a, b) * b)


_FUNCTIONS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": _fused,
    "mad": _fused,
    "div": _quotient,
    "rem": _remainder,
    "neg": lambda a: -a,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "popc": lambda a: np.bitwise_count(a),
}


@opcode(*_FUNCTIONS)
def _arithmetic(instruction: Instruction, program: Program) -> Step:
    name, *modifiers = instruction.opcode
    kind = type_of(modifiers[-1])
    if "sat" in modifiers:
        raise unknown(instruction)
    if "wide" in modifiers:
        return _wide(instruction, program, kind)
    if "hi" in modifiers:
        return _high(instruction, program, kind)
    return _elementwise(instruction, program, kind, _FUNCTIONS[name])


def _elementwise(
    instruction: Instruction, program: Program, kind: Type, function: Function
) -> Step:
    write = writer(instruction.operands[0], program)
    reads = [reader(operand, program, kind) for operand in instruction.operands[1:]]
    if kind.name == "pred" or not (kind.is_float or kind.is_signed or kind.count > 1):
        return lambda machine: write(machine, function(*[read(machine) for read in reads]))
    of_registers = on_elements(function, kind)
    return lambda machine: write(machine, of_registers(*[read(machine) for read in reads]))


@opcode("min", "max")
def _extreme(instruction: Instruction, program: Program) -> Step:
    name, *modifiers = instruction.opcode
    kind = type_of(modifiers[-1])
    functions: dict[str, Function]
    if kind.is_float and "NaN" not in modifiers:
        functions = {"min": np.fmin, "max": np.fmax}
    else:
        functions = {"min": np.minimum, "max": np.maximum}
    return _elementwise(instruction, program, kind, functions[name])


def _wide(instruction: Instruction, program: Program, kind: Type) -> Step:
    """Twice as wide as its factors."""
    double = type_of(f"{kind.name[0]}{2 * kind.bits}")
    write = writer(instruction.operands[0], program)
    left, right = (number(operand, program, kind) for operand in instruction.operands[1:3])
    added = [number(operand, program, double) for operand in instruction.operands[3:]]
    dtype = decode(np.zeros(1, double.dtype), double).dtype

    def step(machine: Machine) -> None:
        product = left(machine).astype(dtype) * right(machine).astype(dtype)
        for read in added:
            product = product + read(machine)
        write(machine, encode(np.asarray(product), double))

    return step


def _high(instruction: Instruction, program: Program, kind: Type) -> Step:
    """The upper half of a product."""
    if kind.count > 1 or instruction.opcode[0] != "mul":
        raise unknown(instruction)
    write = writer(instruction.operands[0], program)
    left, right = (number(operand, program, kind) for operand in instruction.operands[1:3])

    def step(machine: Machine) -> None:
        a, b = left(machine), right(machine)
        if kind.bits == 32:
            dtype: Any = np.int64 if kind.is_signed else np.uint64
            product = (a.astype(dtype) * b.astype(dtype)) >> dtype(32)
            write(machine, product.astype(np.uint32))
        else:
            exact = (a.astype(object) * b.astype(object)) >> kind.bits
            write(machine, (exact & ((1 << kind.bits) - 1)).astype(kind.dtype))

    return step


_LOGIC: dict[str, Function] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}


@opcode(*_LOGIC)
def _logic(instruction: Instruction, program: Program) -> Step:
    return _elementwise(
        instruction, program, type_of(instruction.opcode[-1]), _LOGIC[instruction.opcode[0]]
    )


@opcode("lop3")
def _logic_of_three(instruction: Instruction, program: Program) -> Step:
    write = writer(instruction.operands[0], program)
    kind = type_of("b32")
    reads = [reader(operand, program, kind) for operand in instruction.operands[1:4]]
    table = int(instruction.operands[4], 0)

    def step(machine: Machine) -> None:
        values = [read(machine) for read in reads]
        result = np.zeros_like(values[0])
        for row in range(8):
            if table >> row & 1:
                term = np.array(0xFFFFFFFF, np.uint32)
                for value, place in zip(values, (4, 2, 1), strict=True):
                    term = term & (value if row & place else ~value)
                result = result | term
        write(machine, result)

    return step


@opcode("shl", "shr")
def _shift(instruction: Instruction, program: Program) -> Step:
    kind = type_of(instruction.opcode[-1])
    write = writer(instruction.operands[0], program)
    values = number(instruction.operands[1], program, kind)
    amounts = reader(instruction.operands[2], program, type_of("u32"))
    is_left = instruction.opcode[0] == "shl"
    keeps_sign = not is_left and kind.is_signed

    def step(machine: Machine) -> None:
        value, amount = values(machine), amounts(machine)
        clamped = np.minimum(amount, np.uint32(kind.bits - 1)).astype(value.dtype)
        result = value << clamped if is_left else value >> clamped
        if not keeps_sign and (amount >= kind.bits).any():
            result = np.where(amount >= kind.bits, value.dtype.type(0), result)
        write(machine, encode(np.asarray(result), kind))

    return step


@opcode("shf")
def _funnel_shift(instruction: Instruction, program: Program) -> Step:
    _, direction, mode, _ = instruction.opcode
    write = writer(instruction.operands[0], program)
    kind = type_of("u32")
    low, high, amounts = (reader(one, program, kind) for one in instruction.operands[1:4])

    def step(machine: Machine) -> None:
        both = low(machine).astype(np.uint64) | (high(machine).astype(np.uint64) << np.uint64(32))
        amount = amounts(machine)
        amount = amount & np.uint32(31) if mode == "wrap" else np.minimum(amount, np.uint32(32))
        by = amount.astype(np.uint64)
        result = both >> by if direction == "r" else (both << by) >> np.uint64(32)
        write(machine, result.astype(np.uint32))

    return step


@opcode("bfe")
def _extract(instruction: Instruction, program: Program) -> Step:
    """Bits ``b`` to ``b + c``; of a signed number with its sign. Never past the last bit here."""
    kind = type_of(instruction.opcode[-1])
    write = writer(instruction.operands[0], program)
    values = reader(instruction.operands[1], program, kind)
    begin, length = (int(operand, 0) for operand in instruction.operands[2:4])
    if begin + length > kind.bits or not length:
        raise unknown(instruction)
    signed = type_of(f"{'s' if kind.is_signed else 'u'}{kind.bits}")

    def step(machine: Machine) -> None:
        up, down = (
            kind.dtype(kind.bits - begin - length),
            kind.dtype(kind.bits - length),
        )
        at_top = decode(np.asarray(values(machine) << up), signed)
        write(machine, encode(at_top >> down.astype(at_top.dtype), signed))

    return step


@opcode("bfi")
def _insert(instruction: Instruction, program: Program) -> Step:
    kind = type_of(instruction.opcode[-1])
    write = writer(instruction.operands[0], program)
    inserted, base = (reader(one, program, kind) for one in instruction.operands[1:3])
    begin, length = (int(operand, 0) for operand in instruction.operands[3:5])
    mask = kind.dtype(((1 << length) - 1) << begin & ((1 << kind.bits) - 1))
    shift = kind.dtype(begin)
    return lambda machine: write(
        machine, (base(machine) & ~mask) | ((inserted(machine) << shift) & mask)
    )


@opcode("brev", "clz")
def _bits_in_order(instruction: Instruction, program: Program) -> Step:
    kind = type_of(instruction.opcode[-1])
    write = writer(instruction.operands[0], program)
    values = reader(instruction.operands[1], program, kind)

    def step(machine: Machine) -> None:
        value = values(machine)
        places = np.arange(kind.bits, dtype=value.dtype)
        bits = (value[..., None] >> places) & value.dtype.type(1)
        if instruction.opcode[0] == "brev":
            result = (bits << places[::-1]).sum(-1, dtype=value.dtype)
        else:
            result = (np.cumsum(bits[..., ::-1], -1) == 0).sum(-1)
        write(machine, result.astype(np.uint32 if kind.bits == 32 else value.dtype))

    return step


@opcode("prmt")
def _permute_bytes(instruction: Instruction, program: Program) -> Step:
    if len(instruction.opcode) != 2:
        raise unknown(instruction)
    write = writer(instruction.operands[0], program)
    kind = type_of("b32")
    low, high, selectors = (reader(one, program, kind) for one in instruction.operands[1:4])

    def step(machine: Machine) -> None:
        both = low(machine).astype(np.uint64) | (high(machine).astype(np.uint64) << np.uint64(32))
        selector = selectors(machine).astype(np.uint64)
        result = np.zeros_like(both)
        for place in range(4):
            chosen = (selector >> np.uint64(4 * place)) & np.uint64(15)
            byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7) > 0, np.uint64(255), np.uint64(0))
            byte = np.where(chosen & np.uint64(8) > 0, sign, byte)
            result = result | (byte << np.uint64(8 * place))
        write(machine, result.astype(np.uint32))

    return step


_COMPARISONS: dict[str, Function] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}


@opcode("set")
def _compare_to_number(instruction: Instruction, program: Program) -> Step:
    """1.0 or all bits where a comparison holds, else 0."""
    _, comparison, *_, target_name, source_name = instruction.opcode
    target, source = type_of(target_name), type_of(source_name)
    if target.count != source.count or len(instruction.operands) != 3:
        raise unknown(instruction)
    write = writer(instruction.operands[0], program)
    left, right = (reader(one, program, source) for one in instruction.operands[1:3])
    element, given = target.element, source.element
    yes = encode(np.array(1.0), element) if target.is_float else np.array(-1).astype(element.dtype)

    def step(machine: Machine) -> None:
        parts = zip(split(left(machine), source), split(right(machine), source), strict=True)
        results = [
            np.where(_COMPARISONS[comparison](decode(a, given), decode(b, given)), yes, 0)
            for a, b in parts
        ]
        write(machine, join([one.astype(element.dtype) for one in results], target))

    return step


@opcode("setp")
def _compare(instruction: Instruction, program: Program) -> Step:
    kind = type_of(instruction.opcode[-1])
    compare = _COMPARISONS[instruction.opcode[1]]
    left, right = (number(one, program, kind) for one in instruction.operands[1:3])
    combined = [word for word in instruction.opcode[2:-1] if word in _LOGIC]
    if kind.count > 1 or len(instruction.operands) != 3 + len(combined):
        raise unknown(instruction)
    targets = [writer(name.strip(), program) for name in instruction.operands[0].split("|")]
    others: list[tuple[Function, Read]] = [
        (_LOGIC[word], _predicate(instruction.operands[3], program)) for word in combined
    ]

    def step(machine: Machine) -> None:
        result = compare(left(machine), right(machine))
        for write, value in zip(targets, (result, ~result), strict=False):
            for combine, other in others:
                value = combine(value, other(machine))
            write(machine, np.asarray(value))

    return step


def _predicate(operand: str, program: Program) -> Read:
    read = reader(operand.lstrip("!"), program, type_of("pred"))
    return (lambda machine: ~read(machine)) if operand.startswith("!") else read


@opcode("selp")
def _select(instruction: Instruction, program: Program) -> Step:
    kind = type_of(instruction.opcode[-1])
    write = writer(instruction.operands[0], program)
    yes, no = (reader(one, program, kind) for one in instruction.operands[1:3])
    which = _predicate(instruction.operands[3], program)
    return lambda machine: write(machine, np.where(which(machine), yes(machine), no(machine)))
