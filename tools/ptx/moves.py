"""PTX's moves between registers and memory, atomics, and no-ops: fences and cache hints.

`tools.ptx.machine` implements `bar`, `bra` and `ret`.
"""

from collections.abc import Callable

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.operands import address, number, opcode, reader, unknown, vector, writer
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import SIGNED, UNSIGNED, Array, Type, decode, encode, type_of

_HINTS = {
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "acquire", "release"),
    *("acq_rel", "weak", "gpu", "sys", "cta", "nc", "L1:evict_first", "L1:evict_last"),
    *("L1:no_allocate", "L1:evict_normal", "L2:cache_hint", "L2:128B", "L2:64B", "L2:256B"),
    *("L2:evict_first", "L2:evict_last", "L2:evict_normal", "L1:evict_unchanged"),
}
_GLOBAL, _SHARED = type_of("u64"), type_of("u32")


@opcode("fence", "membar", "griddepcontrol", "prefetch", "nanosleep", "createpolicy", "bar")
def _nothing(instruction: Instruction, program: Program) -> Step:
    """Fences and a warp's barrier order what here is in order; `griddepcontrol` waits for a
    kernel that has ended; a policy is only ever a hint's operand."""
    if instruction.opcode[0] == "createpolicy":
        write = writer(instruction.operands[0], program)
        return lambda machine: write(machine, np.array(0, np.uint64))
    return lambda machine: None


@opcode("mov")
def _move(instruction: Instruction, program: Program) -> Step:
    target, source = instruction.operands
    kind = type_of(instruction.opcode[-1])
    if target.startswith("{"):
        return _unpack(vector(target), source, program, kind)
    write = writer(target, program)
    if source.startswith("{"):
        return _pack(target, vector(source), program, kind)
    read = reader(source, program, kind)
    return lambda machine: write(machine, read(machine))


def _unpack(targets: list[str], source: str, program: Program, kind: Type) -> Step:
    width = kind.bits // len(targets)
    writes = [writer(name, program) for name in targets]
    read = reader(source, program, kind)

    def step(machine: Machine) -> None:
        bits = read(machine)
        for place, write in enumerate(writes):
            part = bits >> bits.dtype.type(place * width)
            write(machine, part.astype(UNSIGNED[width]))

    return step


def _pack(target: str, sources: list[str], program: Program, kind: Type) -> Step:
    width = kind.bits // len(sources)
    write = writer(target, program)
    reads = [reader(name, program, type_of(f"b{width}")) for name in sources]

    def step(machine: Machine) -> None:
        bits = np.array(0, kind.dtype)
        for place, read in enumerate(reads):
            bits = bits | (read(machine).astype(kind.dtype) << kind.dtype(place * width))
        write(machine, np.asarray(bits))

    return step


@opcode("cvta")
def _same_address(instruction: Instruction, program: Program) -> Step:
    if not {"global", "param"} & set(instruction.opcode):
        raise unknown(instruction)
    write = writer(instruction.operands[0], program)
    read = reader(instruction.operands[1], program, _GLOBAL)
    return lambda machine: write(machine, read(machine))


@opcode("ld", "st")
def _load_or_store(instruction: Instruction, program: Program) -> Step:
    name, *words = instruction.opcode
    kind = type_of(words[-1])
    space = {word.partition(":")[0] for word in words} & {"param", "global", "shared"}
    count = next((int(word[1:]) for word in words if word in ("v2", "v4", "v8")), 1)
    known = {*_HINTS, "global", "shared", "shared:cta", "param", f"v{count}"}
    if len(space) != 1 or not known.issuperset(words[:-1]):
        raise unknown(instruction)
    if space == {"param"}:
        return _load_parameter(instruction, program, kind)
    is_global = space == {"global"}
    if name == "ld":
        return _load(instruction, program, kind, count, is_global)
    return _store(instruction, program, kind, count, is_global)


def _load_parameter(instruction: Instruction, program: Program, kind: Type) -> Step:
    target, source = instruction.operands
    write = writer(target, program)
    name = source.strip("[] ")
    if name not in {parameter for _, parameter in program.parameters}:
        raise unknown(instruction)
    width = program.registers[target]

    def step(machine: Machine) -> None:
        bits = np.array(machine.parameters[name] & ((1 << kind.bits) - 1), np.uint64)
        write(machine, _widened(bits.astype(kind.dtype), kind, width))

    return step


def _widened(bits: Array, kind: Type, width: int) -> Array:
    """As a register of ``width`` keeps it: a signed number with its sign."""
    if kind.is_signed and width > kind.bits:
        wide: Array = decode(bits, kind).astype(SIGNED[width])
        return wide.view(UNSIGNED[width])
    return bits


def _load(
    instruction: Instruction, program: Program, kind: Type, count: int, is_global: bool
) -> Step:
    names = vector(instruction.operands[0])
    writes = [writer(name, program) for name in names]
    widths = [program.registers.get(name, kind.bits) for name in names]
    where = address(instruction.operands[1], program, _GLOBAL if is_global else _SHARED)
    width = kind.bits // 8
    if len(names) != count:
        raise unknown(instruction)

    def step(machine: Machine) -> None:
        addresses = machine.lanes(where(machine))
        if is_global:
            words = machine.memory.load(addresses, machine.active, count * width, width)
        else:
            words = load_shared(machine, addresses, count * width, width)
        for write, word, register_width in zip(writes, words, widths, strict=True):
            write(machine, _widened(word, kind, register_width))

    return step


def _store(
    instruction: Instruction, program: Program, kind: Type, count: int, is_global: bool
) -> Step:
    reads = [reader(name, program, kind) for name in vector(instruction.operands[1])]
    where = address(instruction.operands[0], program, _GLOBAL if is_global else _SHARED)
    size = kind.bits // 8 * count
    if len(reads) != count:
        raise unknown(instruction)

    def step(machine: Machine) -> None:
        addresses = machine.lanes(where(machine))
        words = [machine.lanes(read(machine)) for read in reads]
        if is_global:
            machine.memory.store(addresses, machine.active, size, words)
        else:
            store_shared(machine, addresses, size, words)

    return step


def load_shared(machine: Machine, addresses: Array, size: int, width: int) -> list[Array]:
    """Words of ``width`` bytes for each lane, 0 for those that take no part."""
    if machine.active is None:
        offsets = machine.shared.check(addresses, machine.cta, size)
        return machine.shared.load(offsets, size, width, machine.warps)
    lanes = np.flatnonzero(machine.active)
    offsets = machine.shared.check(addresses[lanes], machine.cta[lanes], size)
    words = []
    for values in machine.shared.load(offsets, size, width, machine.warps[lanes]):
        word = np.zeros(machine.num_lanes, values.dtype)
        word[lanes] = values
        words.append(word)
    return words


def store_shared(machine: Machine, addresses: Array, size: int, words: list[Array]) -> None:
    if machine.active is None:
        offsets = machine.shared.check(addresses, machine.cta, size)
        machine.shared.store(offsets, size, words, machine.warps)
        return
    lanes = np.flatnonzero(machine.active)
    offsets = machine.shared.check(addresses[lanes], machine.cta[lanes], size)
    machine.shared.store(offsets, size, [word[lanes] for word in words], machine.warps[lanes])


_UPDATES: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda old, new: old + new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "min": np.minimum,
    "max": np.maximum,
    "exch": lambda old, new: new,
}


@opcode("atom", "red")
def _atomic(instruction: Instruction, program: Program) -> Step:
    """One lane after the other, in their order."""
    name, *words = instruction.opcode
    kind = type_of(words[-1])
    is_global = "global" in words
    operation = next((word for word in words if word in ("cas", *_UPDATES)), None)
    known = {*_HINTS, "global", "shared", "shared:cta", "noftz", operation}
    if operation is None or not known.issuperset(words[:-1]) or kind.count > 1:
        raise unknown(instruction)
    if not is_global and "shared" not in {word.partition(":")[0] for word in words}:
        raise unknown(instruction)
    target, where_text, *values_text = (
        instruction.operands if name == "atom" else ("_", *instruction.operands)
    )
    write = writer(target, program)
    where = address(where_text, program, _GLOBAL if is_global else _SHARED)
    values = [number(text, program, kind) for text in values_text]
    size = kind.bits // 8

    def step(machine: Machine) -> None:
        addresses = machine.lanes(where(machine))
        given = [machine.lanes(value(machine)) for value in values]
        result = np.zeros(machine.num_lanes, kind.dtype)
        outer = machine.active
        for turn in _turns(addresses, machine, is_global):
            active = np.zeros(machine.num_lanes, np.bool_)
            active[turn] = True
            machine.active = active
            at = None if is_global else _atomic_places(machine, addresses, turn, size)
            bits = np.zeros(machine.num_lanes, kind.dtype)
            if at is None:
                bits = machine.memory.load(addresses, active, size, size)[0]
            else:
                bits[turn] = machine.shared.bytes.view(kind.dtype)[at // size]
            old = decode(bits, kind)
            if operation == "cas":
                new = encode(np.where(old == given[0], given[1], old), kind)
            else:
                new = encode(np.asarray(_UPDATES[operation](old, given[0])), kind)
            if at is None:
                machine.memory.store(addresses, active, size, [new])
            else:
                machine.shared.put(at, size, [new[turn]])
            result = np.where(active, bits, result)
        machine.active = outer
        write(machine, result)

    return step


def _atomic_places(machine: Machine, addresses: Array, lanes: Array, size: int) -> Array:
    """Offsets in shared memory, noted as an atomic's."""
    offsets = machine.shared.check(addresses[lanes], machine.cta[lanes], size)
    machine.shared.races.write(offsets, size, machine.warps[lanes], is_atomic=True)
    return offsets


def _turns(addresses: Array, machine: Machine, is_global: bool) -> list[Array]:
    """The lanes that take part, in groups within which no two meet at one address: the first
    lane of each address, then the second, and so on."""
    lanes = np.arange(machine.num_lanes)
    if machine.active is not None:
        lanes = np.flatnonzero(machine.active)
    places = addresses[lanes].astype(np.uint64)
    if not is_global:
        places = places + machine.cta[lanes].astype(np.uint64) * np.uint64(1 << 32)
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    lengths = np.diff(np.concatenate([begins, [len(ordered)]]))
    rank = np.arange(len(ordered)) - np.repeat(begins, lengths)
    return [lanes[order[rank == turn]] for turn in range(int(rank.max()) + 1)] if len(rank) else []
