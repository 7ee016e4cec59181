"""`import quire`: one package of five folders, with the names of the offline API and a version."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quire
from quire import llm

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ["router", "proto", "kernels", "cluster", "worker"]


def alone(program: str, *roots: str) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` with third-party packages and these folders of the checkout, or with the
    whole installed package where none is given."""
    path = os.pathsep.join([str(ROOT / root) for root in roots])
    others = [each for each in sys.path if each.endswith("site-packages")]
    setup = f"import sys; sys.path += {others}\n" if roots else ""
    options = ["-S"] if roots else []  # Without the .pth file of an editable install.
    return subprocess.run(
        [sys.executable, *options, "-c", setup + program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_the_names_of_the_offline_api_are_the_package_s_own() -> None:
    assert set(quire.__all__) == {*llm.__all__, "__version__"}
    for name in llm.__all__:
        assert getattr(quire, name) is getattr(llm, name)
    assert set(quire.__all__) <= set(dir(quire))


def test_the_version_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert quire.__version__ == project["version"]


def test_nothing_else_asks_for_the_version_of_the_distribution() -> None:
    """The distribution's name differs from the package's."""
    sources = [path for root in ROOTS for path in (ROOT / root / "quire").rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if 'version("quire' in path.read_text()] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Llm'"):
        _ = quire.Llm  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from quire import nothing  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    "program",
    [
        "import quire; quire.__version__",
        "import quire.worker.request.request, quire.router.policies",
    ],
)
def test_importing_it_loads_no_torch(program: str) -> None:
    done = alone(f"{program}\nimport sys; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_worker_and_its_kernels_are_enough() -> None:
    """A GPU machine without Ray has only these two."""
    program = "import quire.kernels.quantization, quire.worker.request.request"
    assert alone(program, "worker", "kernels").returncode == 0
    assert alone("import quire.cluster", "worker", "kernels").returncode == 1


def test_folders_that_nothing_installed_have_no_version() -> None:
    program = (
        "import importlib.metadata as metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import quire; print(quire.__version__)"
    )
    assert alone(program, "worker").stdout == "0+unknown\n"


def test_the_order_of_the_folders_does_not_matter() -> None:
    program = "import quire.cluster.cli.main, quire.router, quire.kernels, quire.v1, quire; "
    for each in (ROOTS, ROOTS[::-1]):
        done = alone(program + "print(len(quire.__path__))", *each)
        assert done.stdout == "5\n", done.stderr
