"""Runs a program for many CTAs at once; each thread is a lane of NumPy arrays.

Threads advance by basic blocks: always those whose next block is first in the text, so that
divergent threads reconverge where their paths do; now and then another block is run. Within a block
all threads execute an instruction together; `tools.ptx.races` finds missing barriers between them.

Steps are closures that `tools.ptx.program` makes of instructions, once for each program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tools.ptx.memory import GlobalMemory, MemoryFault, SharedMemory
from tools.ptx.parse import Instruction, Program
from tools.ptx.races import Race
from tools.ptx.values import UNSIGNED, Array

if TYPE_CHECKING:
    from tools.ptx.copies import Copies
    from tools.ptx.wgmma import Products

Step = Callable[["Machine"], None]
_END = np.iinfo(np.int32).max
MAX_BLOCKS = 1 << 17
"""Blocks that a launch may run before it is taken to hang."""


FAIR_TURNS = 16
"""How often another place than the first has its turn: a CTA that waits in a loop for one that is
further on would else keep it from running."""


class Fault(Exception):
    """A kernel did what a GPU would not forgive. The message names kernel and instruction."""


@dataclass(frozen=True, kw_only=True)
class Jump:
    """How a block ends."""

    kind: str
    """``bra``, ``ret`` or ``bar``; ``next`` where the block just ends."""
    target: int = 0
    guard: str | None = None
    negated: bool = False


@dataclass(frozen=True, kw_only=True)
class CompiledBlock:
    steps: list[tuple[Step, Instruction]]
    jump: Jump


class _Registers(dict[str, Array]):
    """By name; one that nobody wrote to is NaN. The compiler reads such: half of a pair whose
    other half alone matters."""

    def __init__(self, program: Program) -> None:
        self._widths = program.registers

    def __missing__(self, name: str) -> Array:
        return np.array(-1).astype(UNSIGNED[self._widths[name]])


class Machine:
    """The state of some CTAs of a launch. Lanes are threads, those of a CTA side by side."""

    def __init__(
        self,
        program: Program,
        *,
        ctas: Array,
        grid: tuple[int, int, int],
        memory: GlobalMemory,
        shared_bytes: int,
        parameters: dict[str, int],
        copies: "Copies",
        products: "Products",
    ) -> None:
        """``ctas`` numbers the CTAs to run, x fastest. ``parameters`` are bits, by name."""
        self.program = program
        self.grid = grid
        self.memory = memory
        self.shared = SharedMemory(len(ctas), shared_bytes)
        self.parameters = parameters
        self.copies = copies
        self.products = products
        threads = program.num_threads
        self.num_lanes = len(ctas) * threads
        self.threads = np.tile(np.arange(threads, dtype=np.uint32), len(ctas))
        self.warps = self.threads >> np.uint32(5)
        """For each lane, its warp's number in its CTA."""
        self.cta_ids = np.repeat(ctas.astype(np.int64), threads)
        self.cta = np.repeat(np.arange(len(ctas)), threads)
        """For each lane, its CTA's place in shared memory."""
        self.registers: dict[str, Array] = _Registers(program)
        self.active: Array | None = None
        """The lanes that take part in the current instruction; None where all do."""
        self.merged: Array | None = None
        """The lanes whose registers it may change; None where none needs its old ones."""
        self._next = np.zeros(self.num_lanes, np.int32)
        self._waits = np.zeros(self.num_lanes, np.bool_)

    def put(self, register: str, bits: Array) -> None:
        """Writes a register in the lanes that take part."""
        dtype = UNSIGNED[self.program.registers[register]]
        if bits.dtype != dtype:
            bits = bits.astype(dtype)
        if self.merged is not None:
            bits = np.where(self.merged, bits, self.registers[register])
        elif bits.ndim == 0:
            bits = np.broadcast_to(bits, (self.num_lanes,))
        self.registers[register] = bits

    def lanes(self, values: Array) -> Array:
        """A value for each lane, of those given or the one that is that of all."""
        return values if values.ndim else np.broadcast_to(values, (self.num_lanes,))

    def whole_warps(self) -> Array | None:
        """For each warp, whether it takes part; None where all do.

        Raises:
            Fault: A warp takes part with some of its threads only.
        """
        if self.active is None:
            return None
        warps = self.active.reshape(-1, 32)
        if (warps.any(1) != warps.all(1)).any():
            raise Fault("threads of one warp went apart")
        some: Array = warps[:, 0]
        return some

    def run(self, blocks: list[CompiledBlock]) -> None:
        """Runs until every thread has ended.

        Raises:
            Fault: An access was wrong, an opcode is unknown, or the threads hang.
        """
        for turn in range(MAX_BLOCKS):
            ready = np.where(self._waits, _END, self._next)
            number = int(ready.min())
            if turn % FAIR_TURNS == 0 and number != _END:
                places = np.unique(ready[ready != _END])
                number = int(places[turn // FAIR_TURNS % len(places)])
            if number == _END:
                if self._waits.any():
                    raise Fault(f"{self.program.name}: threads wait at a barrier for ended ones")
                return
            here = ready == number
            self.active = None if here.all() else here
            is_rest = self.active is None or bool((here | (self._next == _END)).all())
            self.merged = None if is_rest else here
            block = blocks[number]
            for step, instruction in block.steps:
                self._step(step, instruction)
            self._leave(number, block.jump, here)
        raise Fault(f"{self.program.name}: hangs, {MAX_BLOCKS} blocks did not end it")

    def _step(self, step: Step, instruction: Instruction) -> None:
        try:
            if instruction.guard is None:
                step(self)
                return
            active, merged = self.active, self.merged
            allowed = self._allowed(instruction.guard, instruction.negated)
            self.active = allowed if active is None else active & allowed
            self.merged = self.active
            if allowed.all():
                self.active, self.merged = active, merged
            if self.active is None or self.active.any():
                step(self)
            self.active, self.merged = active, merged
        except (MemoryFault, Race, Fault) as error:
            where = f" ({instruction.source})" if instruction.source else ""
            raise Fault(f"{self.program.name}: {instruction.text}{where}: {error}") from error

    def _allowed(self, guard: str, negated: bool) -> Array:
        predicate = self.registers[guard]
        return ~predicate if negated else predicate

    def _leave(self, number: int, jump: Jump, here: Array) -> None:
        if jump.kind == "bar":
            self._next[here] = number + 1
            self._waits |= here
            waits = self._waits.reshape(-1, self.program.num_threads)
            ended = (self._next == _END).reshape(waits.shape)
            passes = waits.any(1) & (waits | ended).all(1)
            waits[passes] = False
            self.shared.races.barriers[passes] += 1
            return
        target = {"bra": jump.target, "ret": _END, "next": number + 1}[jump.kind]
        if jump.guard is None:
            self._next[here] = target
        else:
            goes = here & self._allowed(jump.guard, jump.negated)
            self._next[here] = number + 1
            self._next[goes] = target
        if target == _END:
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Where at most half of the CTAs are left, goes on with these alone."""
        threads = self.program.num_threads
        runs = (self._next != _END).reshape(-1, threads).any(1)
        if runs.sum() * 2 > len(runs) or not runs.any() or self.copies or self.products:
            return
        lanes = np.repeat(runs, threads)
        self.shared.keep(runs)
        for name, bits in self.registers.items():
            self.registers[name] = bits[lanes]
        self.threads, self.warps = self.threads[lanes], self.warps[lanes]
        self.cta_ids = self.cta_ids[lanes]
        self.cta = np.repeat(np.arange(int(runs.sum())), threads)
        self._next, self._waits = self._next[lanes], self._waits[lanes]
        self.copies.keep(lanes)
        self.products.keep(lanes)
        self.num_lanes = len(self.threads)
