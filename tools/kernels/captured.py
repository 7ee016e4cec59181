"""Launches of Triton kernels without a GPU: compiled just as one would have them compiled.

Inside `captured`, ``kernel[grid](...)`` goes Triton's own way: it looks at the arguments, decides
what to specialise (an integer that is 1, a pointer or an integer divisible by 16), and compiles
for the GPU asked for. Only the last step, to start the kernel, is the caller's.

    with captured(90, launches.append):
        decode_attention(...)          # on meta tensors, or on a CPU's where the kernel shall run

A kernel must have been defined without ``TRITON_INTERPRET=1``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.kernels import launch


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a compiled kernel."""

    kernel: Any
    """The `triton.jit` function."""
    compiled: Any
    """Triton's `CompiledKernel`, whose ``asm["ptx"]`` and ``asm["cubin"]`` are its code; None where
    nothing was to be compiled."""
    key: str | None
    """By what Triton tells compiled forms of the kernel apart, where nothing was to be compiled:
    what it specialised of each argument, and the options. On a GPU a key that is new is compiled
    while the launch waits."""
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    """By name, in the order of the parameters: tensors and numbers, but for those that Triton
    compiles into the code, as it does an integer that is 1."""
    constants: dict[str, Any]
    """The `tl.constexpr` parameters."""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def types(self) -> dict[str, str]:
        """Triton's types of ``arguments``: ``*bf16``, ``i32``, ``fp32`` and so on."""
        return {name: str(self.compiled.src.signature[name]) for name in self.arguments}


@contextmanager
def captured(
    capability: int, run: Callable[[Launch], None], *, compiles: bool = True
) -> Iterator[None]:
    """Until the block ends, gives every launch to ``run`` and takes tensors of a CPU or of none
    for those of a GPU of ``capability`` (80, 90 ...). Not for several threads at a time."""
    original = JITFunction.run
    keys: list[str] = []

    def refuse(*, key: str, **_: Any) -> bool:
        keys.append(key)
        return True

    def run_captured(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = original(self, *args, grid=grid, warmup=True, **kwargs)
        key = None if compiles else keys.pop()
        if not warmup:
            run(_launch(self, compiled, key, grid, args, kwargs))
        return compiled

    before = driver._active
    token = launch.capability_without_gpu.set(capability)
    JITFunction.run = run_captured
    driver.set_active(_driver(capability, compiles))
    try:
        with knobs.runtime.scope():
            if not compiles:
                knobs.runtime.jit_cache_hook = refuse
            yield
    finally:
        driver.set_active(before)
        JITFunction.run = original
        launch.capability_without_gpu.reset(token)


def _launch(
    kernel: Any,
    compiled: Any,
    key: str | None,
    grid: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Launch:
    bound = kernel.signature.bind(
        *args, **{name: value for name, value in kwargs.items() if name in kernel.arg_names}
    )
    bound.apply_defaults()
    shape = tuple(grid(bound.arguments) if callable(grid) else grid)
    values = bound.arguments
    types = dict.fromkeys(values, "") if compiled is None else compiled.src.signature
    constants = {param.name for param in kernel.params if param.is_constexpr}
    return Launch(
        kernel=kernel,
        compiled=compiled,
        key=key,
        grid=(*shape, 1, 1, 1)[:3],
        arguments={
            name: value
            for name, value in values.items()
            if name not in constants and types[name] != "constexpr"
        },
        constants={name: value for name, value in values.items() if name in constants},
    )


@cache
def _driver(capability: int, compiles: bool) -> "_NoGpu":
    return _NoGpu(capability, compiles=compiles)


class _NoGpu:
    """What Triton asks of a driver before it compiles.

    Each capability is a device of its own, as Triton keeps what it compiled by device; and so is
    one for which nothing is compiled, so that Triton asks for every launch.
    """

    def __init__(self, capability: int, *, compiles: bool) -> None:
        self._capability = capability
        self._device = capability if compiles else -capability

    def get_current_target(self) -> GPUTarget:
        if self._capability == launch.AMD_CAPABILITY:
            return GPUTarget("hip", "gfx942", 64)
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0
