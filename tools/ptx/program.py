"""Compiles PTX into steps, once for each text, and runs them over a grid."""

from functools import cache

import numpy as np
from tools.ptx import arithmetic, convert, copies, matrix, moves, warps, wgmma
from tools.ptx.copies import Copies
from tools.ptx.machine import CompiledBlock, Jump, Machine
from tools.ptx.memory import GlobalMemory
from tools.ptx.operands import OPCODES, unknown
from tools.ptx.parse import Instruction, Program, parse
from tools.ptx.wgmma import Products

assert all((arithmetic, convert, copies, matrix, moves, warps, wgmma))  # they fill OPCODES

MAX_LANES = 1 << 14
"""Threads that run at once: enough that NumPy's own time is that of the data, and few enough that
what an instruction touches stays in the cache."""
_JUMPS = ("bra", "ret", "exit", "bar", "barrier")


@cache
def steps_of(ptx: str) -> tuple[Program, list[CompiledBlock]]:
    """
    Raises:
        NotImplementedError: An opcode is not known here; the message names it.
    """
    program = parse(ptx)
    blocks = []
    for block in program.blocks:
        instructions = block.instructions
        last = instructions[-1]
        ends = last.opcode[0] in _JUMPS and last.opcode[1:2] != ("warp",)
        jump = _jump(last, program) if ends else Jump(kind="next")
        steps = [
            (OPCODES[one.opcode[0]](one, program), one)
            for one in (instructions[:-1] if ends else instructions)
            if _is_known(one)
        ]
        blocks.append(CompiledBlock(steps=steps, jump=jump))
    blocks.append(CompiledBlock(steps=[], jump=Jump(kind="ret")))
    return program, blocks


def _is_known(instruction: Instruction) -> bool:
    if instruction.opcode[0] not in OPCODES:
        raise unknown(instruction)
    return True


def _jump(instruction: Instruction, program: Program) -> Jump:
    kind = {"exit": "ret", "barrier": "bar"}.get(instruction.opcode[0], instruction.opcode[0])
    if kind == "bra":
        return Jump(
            kind=kind,
            target=program.labels[instruction.operands[0]],
            guard=instruction.guard,
            negated=instruction.negated,
        )
    is_plain = instruction.guard is None or kind == "ret"
    if kind == "bar" and (instruction.operands != ("0",) or "sync" not in instruction.opcode):
        is_plain = False
    if not is_plain:
        raise unknown(instruction)
    return Jump(kind=kind, guard=instruction.guard, negated=instruction.negated)


def run(
    ptx: str,
    *,
    grid: tuple[int, int, int],
    memory: GlobalMemory,
    arguments: list[int],
    shared_bytes: int,
) -> None:
    """Runs a kernel over a grid, its CTAs side by side as far as `MAX_LANES` allows.

    ``arguments`` are bits, in the order of the parameters; those left out are 0.

    Raises:
        Fault: It did what a GPU would not forgive.
        NotImplementedError: An opcode is not known here.
    """
    program, blocks = steps_of(ptx)
    num_ctas = grid[0] * grid[1] * grid[2]
    names = [name for _, name in program.parameters]
    parameters = {**dict.fromkeys(names, 0), **dict(zip(names, arguments, strict=False))}
    at_once = max(1, MAX_LANES // program.num_threads)
    for first in range(0, num_ctas, at_once):
        ctas = np.arange(first, min(first + at_once, num_ctas))
        num_lanes = len(ctas) * program.num_threads
        with np.errstate(all="ignore"):
            Machine(
                program,
                ctas=ctas,
                grid=grid,
                memory=memory,
                shared_bytes=shared_bytes,
                parameters=parameters,
                copies=Copies(num_lanes),
                products=Products(num_lanes),
            ).run(blocks)
