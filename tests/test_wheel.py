"""A wheel with our compiled C++ libraries works on a machine without a compiler."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from quire.kernels.native import library as native

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import torch
from quire.kernels.native import library as native
from quire.kernels.native.backend import NativeBackend
from quire.router.prefix_index import native_index
from quire.worker.blocks import native_hashing

linear = NativeBackend(native.library()).pack_linear(torch.arange(6.0).view(3, 2))
print(linear(torch.tensor([[1.0, 10.0]])).tolist())
for library in (native.library(), native_index.library(), native_hashing.library()):
    if library is not None:  # Not every CPU can hash.
        print(library._name)
"""


@pytest.mark.slow
def test_its_libraries_are_loaded_and_nothing_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    isa = os.environ.get("QUIRE_NATIVE_ISA") or native.available_isas()[0]
    compiled = native.build(isa)
    wheel = build_wheel(tmp_path, isa)
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert "linux" in wheel.name

    python = environment(tmp_path / "venv")
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    variables = {**os.environ, "PATH": "", "QUIRE_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("CXX", "QUIRE_NATIVE"):
        variables.pop(name, None)
    variables["QUIRE_NATIVE_ISA"] = isa
    run = subprocess.run(
        [python, "-c", PROGRAM], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    result, *libraries = run.stdout.splitlines()
    assert result == "[[10.0, 32.0, 54.0]]"
    assert len(libraries) >= 2
    for library in map(Path, libraries):
        assert library.parts[-3:-1] == ("quire", "prebuilt")
        assert library.is_relative_to(tmp_path / "venv")
    # Same sources and compiler, so a stream may move between groups with either library.
    assert Path(libraries[0]).name == compiled.name
    assert not (tmp_path / "cache").exists()


def build_wheel(folder: Path, isa: str) -> Path:
    variables = {"QUIRE_BUILD_NATIVE": "1", "QUIRE_NATIVE_ISA": isa}
    pip(
        *("wheel", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--wheel-dir", str(folder / "dist"), str(ROOT)),
        **variables,
    )
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def environment(folder: Path) -> Path:
    """The Python of a new environment with the packages installed here, without this checkout."""
    venv.create(folder, symlinks=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site,) = (folder / "lib").glob("python*/site-packages")
    # .pth files in that folder, such as an editable install's, are not read.
    (site / "here.pth").write_text(f"{here}\n")
    return folder / "bin" / "python"


def pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
