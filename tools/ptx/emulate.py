"""Launches kernels as on a GPU and runs them in the interpreter; see the package's docstring."""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tools.kernels.captured import Launch, captured
from tools.ptx.memory import GlobalMemory
from tools.ptx.program import run

Edit = Callable[[str], str]


@contextmanager
def emulated(
    capability: int,
    *,
    memory: Sequence[torch.Tensor] = (),
    edits: dict[str, Edit] | None = None,
    launches: list[Launch] | None = None,
) -> Iterator[None]:
    """Until the block ends, every Triton kernel that is launched on a CPU's tensors is compiled
    for a GPU of ``capability`` and its PTX is run on their memory.

    ``memory`` is what kernels reach by addresses that they find in memory and not by an argument.
    ``edits`` change the PTX of kernels, by name, before it runs: to plant a fault. Launches are
    appended to ``launches``.
    """

    def start(launch: Launch) -> None:
        if launches is not None:
            launches.append(launch)
        ptx = launch.compiled.asm["ptx"]
        edit = (edits or {}).get(launch.name)
        run_launch(launch, ptx if edit is None else edit(ptx), memory=memory)

    with captured(capability, start):
        yield


def run_launch(launch: Launch, ptx: str, *, memory: Sequence[torch.Tensor] = ()) -> None:
    """Runs a launch with this PTX.

    Raises:
        Fault: An access out of bounds, not aligned, or something else a GPU would not forgive.
        NotImplementedError: An opcode is not known.
    """
    tensors = [(name, x) for name, x in launch.arguments.items() if isinstance(x, torch.Tensor)]
    tensors += [(f"memory {number}", tensor) for number, tensor in enumerate(memory)]
    run(
        ptx,
        grid=launch.grid,
        memory=GlobalMemory(tensors),
        arguments=[_bits(value, launch.types[name]) for name, value in launch.arguments.items()],
        shared_bytes=launch.compiled.metadata.shared,
    )


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.data_ptr())
    if kind in ("fp32", "fp64"):
        packed = struct.pack("<f" if kind == "fp32" else "<d", value)
        return int.from_bytes(packed, "little")
    return int(value) & 0xFFFFFFFFFFFFFFFF
