"""Rewrites that fuse or reorder a program's operations. None changes a bit of the logits."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from quire.kernels.ops import Add, AddNorm, Gather, Linear, Norm, Op, Program, Value

_Rule = Callable[[Op, Op, Program], tuple[Op, ...] | None]
"""Takes two adjacent operations and the rest of the program; returns their replacement, or ``None``
to keep them."""


def fuse_linear_add(program: Program) -> Program:
    """Fuses a product with the `Add` that is its only use."""

    def rule(op: Op, after: Op, rest: Program) -> tuple[Op, ...] | None:
        if not isinstance(op, Linear) or not isinstance(after, Add) or op.adds:
            return None
        if op.out != after.x or after.scale != 1.0 or _is_read(after.x, rest):
            return None
        return (replace(op, out=after.to, adds=True),)

    return _rewrite(program, rule)


def fuse_add_norm(program: Program) -> Program:
    """Fuses an `Add` with the RMS norm of its sum."""

    def rule(op: Op, after: Op, rest: Program) -> tuple[Op, ...] | None:
        del rest
        if not isinstance(op, Add) or not isinstance(after, Norm) or after.x != op.to:
            return None
        if op.scale != 1.0 or after.kind != "rms":
            return None
        return (AddNorm(weight_C=after.weight_C, eps=after.eps, x=op.x, to=op.to, out=after.out),)

    return _rewrite(program, rule)


def gather_before_add(program: Program) -> Program:
    """Moves `Gather` before the last `Add`, which only sampled rows need."""

    def rule(op: Op, after: Op, rest: Program) -> tuple[Op, ...] | None:
        del rest
        if not isinstance(op, Add) or not isinstance(after, Gather) or after.x != op.to:
            return None
        return (Gather(x=op.x), after, op)

    return _rewrite(program, rule)


def _rewrite(program: Program, rule: _Rule) -> Program:
    """Applies ``rule`` to each adjacent pair, from the first on."""
    ops: list[Op] = []
    at = 0
    while at < len(program):
        pair = program[at : at + 2]
        instead = rule(*pair, program[at + 2 :]) if len(pair) == 2 else None
        ops += pair[:1] if instead is None else instead
        at += 1 if instead is None else 2
    return tuple(ops)


def _is_read(value: Value, ops: Iterable[Op]) -> bool:
    """Whether one of ``ops`` reads the value before it is overwritten."""
    for op in ops:
        needs = {getattr(op, "x", None), getattr(op, "to", None)}
        if value in needs or (isinstance(op, Linear) and op.adds and op.out == value):
            return True
        if getattr(op, "out", None) == value:
            return False
    return False
