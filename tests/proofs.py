"""Long tests that need no second run while nothing on which they depend has changed.

    python -m tests.proofs holds [-fsanitize=…] FILE…
    python -m tests.proofs write [-fsanitize=…] FILE…

``holds`` ends with 0 if `proofs.json`, the ledger, has the present digest of each file of tests;
``write`` writes the digests, once all these tests have passed. The flag stands for tests that ran
with C++ compiled with it (`make sanitize`).

A digest is taken of the file and its folder's conftest, of each module of this repository that they
import, directly or not, of the C++ beside these modules, and of the versions of the compiler and of
the packages. ``pytest --skip-proven`` skips slow tests with the mark ``proof`` whose file has its
digest in the ledger, except one in `SAMPLE`, which are others at each commit. `make prove` runs all
whose files have another, and writes the ledger.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "tests" / "proofs.json"
SAMPLE = 20
"""One in this number of proven tests runs all the same."""
SOURCE_ROOTS = [ROOT / name for name in ("", "kernels", "worker", "router", "cluster", "proto")]


def holds(file: Path, flag: str = "") -> bool:
    """Whether the ledger has the present digest of a file of tests, whose C++ is compiled with
    ``flag`` too."""
    return _ledger().get(_key(file, flag)) == digest(file)


def is_drawn(test: str) -> bool:
    """Whether a proven test runs at this commit all the same."""
    return crc32(f"{_commit()} {test}".encode()) % SAMPLE == 0


@functools.cache
def digest(file: Path) -> str:
    """A hash of everything on which the tests of ``file`` depend."""
    sources, packages = dependencies(file)
    lines = [f"{_name(path)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sources]
    lines += sorted(f"{name} {_version(name)}" for name in packages)
    lines.append(f"Python {platform.python_version()} {platform.machine()}")
    if any(path.suffix == ".cpp" for path in sources):
        lines += [_compiler(), *_instruction_sets()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def dependencies(file: Path) -> tuple[list[Path], set[str]]:
    """The files of this repository and the names of the other packages that ``file`` imports,
    directly or not, with itself, its folder's conftest and the C++ beside its modules."""
    found: set[Path] = set()
    packages: set[str] = set()
    waiting = [path for path in (file, file.with_name("conftest.py")) if path.is_file()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in _imports(path):
            module = _module(name)
            if module is not None:
                waiting.append(module)
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                packages.add(name.partition(".")[0])
    native = {folder for path in found for folder in (path.parent, path.parent / "native")}
    found.update(path for folder in native for path in folder.glob("*.cpp"))
    found.update(path for folder in native for path in folder.glob("*.h"))
    return sorted(found), packages - {"quire", "tests", "tools", "bench"}


_IMPORTERS = ("pytest.importorskip", "importlib.import_module")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORTERS:
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


@functools.cache
def _module(name: str) -> Path | None:
    for root in SOURCE_ROOTS:
        path = root.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return None


def _version(package: str) -> str:
    distributions = _distributions().get(package, [])
    return " ".join(importlib.metadata.version(name) for name in distributions) or "absent"


@functools.cache
def _distributions() -> dict[str, list[str]]:
    named = importlib.metadata.packages_distributions()
    return {package: sorted(set(names)) for package, names in named.items()}


@functools.cache
def _compiler() -> str:
    try:
        asked = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no compiler"
    return asked.stdout.partition("\n")[0]


def _instruction_sets() -> tuple[str, ...]:
    from quire.kernels.native import library as native

    return tuple(native.available_isas())


@functools.cache
def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()


@functools.cache
def _ledger() -> dict[str, str]:
    ledger: dict[str, str] = json.loads(LEDGER.read_text()) if LEDGER.is_file() else {}
    return ledger


def _name(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def _key(file: Path, flag: str) -> str:
    return f"{_name(file)} {flag}".strip()


def main(action: str, *arguments: str) -> int:
    flag = "".join(each for each in arguments if each.startswith("-"))
    files = [Path(each).resolve() for each in arguments if not each.startswith("-")]
    if action == "holds":
        return 0 if all(holds(file, flag) for file in files) else 1
    ledger = _ledger() | {_key(file, flag): digest(file) for file in files}
    kept = {key: ledger[key] for key in sorted(ledger) if (ROOT / key.split()[0]).is_file()}
    LEDGER.write_text(json.dumps(kept, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
