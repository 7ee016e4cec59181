"""Captures launches of Triton kernels without a GPU, compiled exactly as for one.

Inside `captured`, ``kernel[grid](...)`` runs Triton's own code: it inspects the arguments, decides
what to specialise (an integer that is 1, a pointer or an integer divisible by 16), and compiles for
the given GPU. Only the last step, starting the kernel, is replaced by a call of the caller's.

    with captured(90, launches.append):
        decode_attention(...)          # on meta tensors, or CPU tensors if the caller runs it

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

from quire.kernels.triton import launch


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a compiled kernel."""

    kernel: Any
    """The `triton.jit` function."""
    compiled: Any
    """Triton's `CompiledKernel`, whose ``asm["ptx"]`` and ``asm["cubin"]`` are its code; None if
    compiling is off."""
    key: str | None
    """If compiling is off, Triton's cache key of the compiled kernel: the specialisation of each
    argument, and the options. On a GPU, a launch with a new key waits for the compiler."""
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    """Tensors and numbers by name, in the order of the parameters, except those that Triton
    compiles into the code, such as an integer that is 1."""
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
    """Passes every launch in the block to ``run``, and treats CPU and meta tensors as those of a
    GPU of ``capability`` (80, 90 ...). Not thread-safe."""
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
    """The driver functions that Triton calls before it compiles.

    Triton caches compiled kernels by device, so each capability is a device of its own. Another one
    stands for compiling off, so that Triton calls the hook at every launch.
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
