"""Compiles Quire's C++ libraries before their first use, so that a start can report this step.

It returns at once if the libraries came with a wheel or were compiled before.
"""

import contextlib
import os
from pathlib import Path

from quire import native_build
from quire.kernels.native import library as native
from quire.router.prefix_index import native_index
from quire.worker.blocks import native_hashing

_NVIDIA = Path("/dev/nvidiactl")


def compile_native_code(*, device: str, is_logged: bool = True) -> None:
    """Compiles the native libraries for ``device``, a value of `EngineConfig.device`. After a
    failure each process runs without the library, and logs that."""
    if os.environ.get("QUIRE_NATIVE", "1") == "0":
        return
    builds = [native_hashing.build, native_index.build]
    if device == "cpu" or (device == "auto" and not _NVIDIA.exists()):
        isa = os.environ.get("QUIRE_NATIVE_ISA") or native.available_isas()[0]
        builds.append(lambda: native.build(isa))
    native_build.logger.disabled = not is_logged
    try:
        for build in builds:
            with contextlib.suppress(native_build.BuildError, OSError, KeyError):
                build()
    finally:
        native_build.logger.disabled = False
