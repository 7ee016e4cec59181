"""`cp.async`: copies from global to shared memory that arrive when a thread waits for them.

From its start until its thread waits for it, a copy's target holds NaN, so that a kernel that reads
too early gives wrong results. Each thread has its own groups of copies.
"""

from dataclasses import dataclass

import numpy as np
from tools.ptx.machine import Machine, Step
from tools.ptx.operands import address, opcode, reader, unknown
from tools.ptx.parse import Instruction, Program
from tools.ptx.values import Array, type_of


@dataclass(frozen=True)
class _Copy:
    lanes: Array
    groups: Array
    """For each lane, the number of the group that this copy belongs to."""
    addresses: Array
    size: int
    words: list[Array]


class Copies:
    def __init__(self, num_lanes: int) -> None:
        self._groups = np.zeros(num_lanes, np.int64)
        """For each lane, the number of groups that it has committed."""
        self._pending: list[_Copy] = []

    def __bool__(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._pending)

    def keep(self, lanes: Array) -> None:
        """Forgets the other lanes; nothing is under way."""
        self._groups = self._groups[lanes]

    def start(self, lanes: Array, addresses: Array, size: int, words: list[Array]) -> None:
        self._pending.append(_Copy(lanes, self._groups[lanes], addresses, size, words))

    def commit(self, active: Array | None) -> None:
        self._groups += 1 if active is None else active

    def wait(self, machine: Machine, limit: int) -> None:
        """Lets all copies of the active lanes arrive but those of their last ``limit`` groups."""
        left = []
        for copy in self._pending:
            ready = copy.groups < self._groups[copy.lanes] - limit
            if machine.active is not None:
                ready &= machine.active[copy.lanes]
            if ready.any():
                offsets = machine.shared.check(
                    copy.addresses[ready], machine.cta[copy.lanes[ready]], copy.size
                )
                words = [word[ready] for word in copy.words]
                machine.shared.store(offsets, copy.size, words, machine.warps[copy.lanes[ready]])
            if not ready.all():
                rest = ~ready
                words = [word[rest] for word in copy.words]
                left.append(
                    _Copy(
                        copy.lanes[rest],
                        copy.groups[rest],
                        copy.addresses[rest],
                        copy.size,
                        words,
                    )
                )
        self._pending = left


@opcode("cp")
def _copy(instruction: Instruction, program: Program) -> Step:
    words = instruction.opcode
    if words[1:3] == ("async", "commit_group"):
        return lambda machine: machine.copies.commit(machine.active)
    if words[1:3] == ("async", "wait_all"):
        return _wait_for_all
    if words[1:3] == ("async", "wait_group"):
        limit = int(instruction.operands[0])
        return lambda machine: machine.copies.wait(machine, limit)
    if words[1] == "async" and words[2] in ("ca", "cg") and "bulk" not in words:
        return _start(instruction, program)
    raise unknown(instruction)


def _wait_for_all(machine: Machine) -> None:
    machine.copies.commit(machine.active)
    machine.copies.wait(machine, 0)


def _start(instruction: Instruction, program: Program) -> Step:
    to = address(instruction.operands[0], program, type_of("u32"))
    source = address(instruction.operands[1], program, type_of("u64"))
    size = int(instruction.operands[2], 0)
    # What lies past the bytes to be read becomes 0.
    present = (
        reader(instruction.operands[3], program, type_of("u32"))
        if len(instruction.operands) > 3
        else None
    )

    def step(machine: Machine) -> None:
        lanes = np.arange(machine.num_lanes)
        if machine.active is not None:
            lanes = np.flatnonzero(machine.active)
        sources = machine.lanes(source(machine))
        sizes = np.full(machine.num_lanes, size) if present is None else present(machine)
        sizes = machine.lanes(np.asarray(sizes))
        reads = np.zeros(machine.num_lanes, np.bool_)
        reads[lanes] = sizes[lanes] > 0
        if (sizes[reads] != size).any():
            raise NotImplementedError("a cp.async that reads a part of its bytes")
        values = machine.memory.load(sources, reads, size, 4)
        addresses = machine.lanes(to(machine))[lanes]
        offsets = machine.shared.check(addresses, machine.cta[lanes], size)
        in_flight = [np.full(len(lanes), 0xFFFFFFFF, np.uint32)] * len(values)
        machine.shared.store(offsets, size, in_flight, machine.warps[lanes])
        machine.copies.start(lanes, addresses, size, [value[lanes] for value in values])

    return step
