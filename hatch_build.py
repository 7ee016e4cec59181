"""Compiles our C++ libraries into the wheel where ``QUIRE_BUILD_NATIVE=1`` asks for it.

The wheel is then one for this platform, with the kernels for every instruction set, or for the one
that ``QUIRE_NATIVE_ISA`` names. `quire.native_build` finds the libraries where this puts them.
Editable installs and wheels that nobody asked it for stay pure Python.
"""

import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The package itself says what it compiles, and needs no more than this to be imported.
_NEEDS = ["numpy"]


class NativeBuildHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        return _NEEDS if _is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not _is_wanted():
            return
        sys.path[:0] = [str(Path(self.root, name)) for name in ("kernels", "worker", "router")]
        for library in _libraries():
            build_data["force_include"][str(library)] = f"quire/prebuilt/{library.name}"
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
        build_data["pure_python"] = False


def _is_wanted() -> bool:
    return os.environ.get("QUIRE_BUILD_NATIVE") == "1"


def _libraries() -> Iterator[Path]:
    from quire.kernels.native import library as native
    from quire.router.prefix_index import native_index
    from quire.worker.blocks import native_hashing

    is_x86 = platform.machine() in ("x86_64", "AMD64")
    chosen = os.environ.get("QUIRE_NATIVE_ISA")
    for isa in [chosen] if chosen else native.ISA_FLAGS if is_x86 else ["portable"]:
        yield native.build(isa)
    yield native_index.build()
    if is_x86:
        yield native_hashing.build()
