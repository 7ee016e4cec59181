"""Which packages may import which: the table of the design, and no import cycles."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "worker" / "quire" / "__init__.py"
MAY_IMPORT = {
    "kernels": set[str](),
    "proto": set[str](),
    "worker": {"kernels"},
    "router": {"kernels", "worker"},  # tests/router/test_imports.py limits these further.
    "cluster": {"kernels", "proto", "router", "worker"},
}
"""Allowed imports by source root; each root may also import itself."""
WORKER_API = ("quire.worker.api",)
MAY_IMPORT_OF_THE_WORKER = {
    "quire.router": WORKER_API,
    "quire.simulate": (*WORKER_API, "quire.worker.cache"),
    # A gateway also needs the tokenizer.
    **dict.fromkeys(
        [f"quire.cluster.{name}" for name in ("edge", "failover", "links", "serving", "telemetry")],
        (*WORKER_API, "quire.worker.text"),
    ),
}
"""The worker's packages that a package may import. Packages not listed may import any."""
KNOWS_RAY = {"cluster", "router/quire/router/serve_router.py"}


def modules() -> dict[str, Path]:
    """Files of Quire's modules by name, without protoc's stubs and `quire` itself."""
    return {
        ".".join(path.relative_to(ROOT / root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for root in MAY_IMPORT
        for path in sorted((ROOT / root / "quire").rglob("*.py"))
        # All folders share the package `quire`, which imports none of their modules.
        if path != PACKAGE
    }


MODULES = modules()


def root_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """The names of the modules that it imports; else only those needed at import time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            # A name imported from a package may be one of its modules.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif everywhere or not (_is_later(node) or _is_for_types(node)):
            yield from imports(node, everywhere=everywhere)


def _is_later(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@pytest.mark.parametrize("root", MAY_IMPORT)
def test_a_folder_imports_only_what_the_design_lets_it(root: str) -> None:
    found = [path for path in MODULES.values() if root_of(path) == root]
    assert found
    for path in found:
        names = set(imports(ast.parse(path.read_text()), everywhere=True))
        used = {root_of(MODULES[name]) for name in names & MODULES.keys()}
        assert used <= MAY_IMPORT[root] | {root}, path
        if not KNOWS_RAY & {root, str(path.relative_to(ROOT))}:
            assert not {name for name in names if name.split(".")[0] == "ray"}, path


def imported_modules() -> dict[str, set[str]]:
    """For each module the modules that it imports at import time."""
    return {
        name: set(imports(ast.parse(path.read_text()), everywhere=False)) & MODULES.keys() - {name}
        for name, path in MODULES.items()
    }


def package_of(name: str) -> str:
    """A module's package; a module beside packages, such as `quire.worker.engine`, is its own."""
    return ".".join(name.split(".")[:3])


def test_no_modules_import_each_other() -> None:
    list(TopologicalSorter(imported_modules()).static_order())  # CycleError names the cycle.


def test_no_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, imported in imported_modules().items():
        others = {package_of(other) for other in imported if not _is_package(other)}
        graph.setdefault(package_of(name), set()).update(others - {package_of(name)})
    assert len(graph) > 20
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", MAY_IMPORT_OF_THE_WORKER)
def test_gateways_and_the_router_import_the_workers_api_alone(package: str) -> None:
    def rule_of(name: str) -> str:
        rules = [rule for rule in MAY_IMPORT_OF_THE_WORKER if name.startswith(f"{rule}.")]
        return max(rules, key=len, default="")

    modules = [name for name in MODULES if rule_of(name) == package]
    assert modules
    for name in modules:
        tree = ast.parse(MODULES[name].read_text())
        imported = set(imports(tree, everywhere=True)) & MODULES.keys()
        of_worker = {package_of(each) for each in imported if each.startswith("quire.worker.")}
        assert of_worker <= set(MAY_IMPORT_OF_THE_WORKER[package]), name


def test_nothing_that_serves_knows_the_simulator_or_the_benches() -> None:
    """The command line imports simulator and benchmarks only when their commands run."""
    tools = ("quire.simulate.", "quire.worker.bench.", "quire.cluster.bench.")
    found = 0
    for name, path in MODULES.items():
        if not f"{name}.".startswith(tools):
            is_command = name.startswith("quire.cluster.cli.")
            imported = imports(ast.parse(path.read_text()), everywhere=not is_command)
            known = {each for each in imported if f"{each}.".startswith(tools)}
            assert not known or name == "quire.cluster.cli.requests", name
            found += bool(known)
    assert found == 1


def _is_package(name: str) -> bool:
    return MODULES[name].name == "__init__.py"
