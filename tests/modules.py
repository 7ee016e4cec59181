"""Quire's modules and what each imports, read from their sources: for the tests of the house."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("kernels", "proto", "worker", "router", "cluster")
PACKAGE = ROOT / "worker" / "quire" / "__init__.py"


def modules() -> dict[str, Path]:
    """Files of Quire's modules by name, without protoc's stubs and `quire` itself."""
    return {
        ".".join(path.relative_to(ROOT / root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for root in ROOTS
        for path in sorted((ROOT / root / "quire").rglob("*.py"))
        # All folders share the package `quire`, which imports none of their modules.
        if path != PACKAGE
    }


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


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


@cache
def imported_at_start() -> dict[str, set[str]]:
    """For each module the modules that it imports at import time."""
    return {
        name: set(imports(tree, everywhere=False)) & MODULES.keys() - {name}
        for name, tree in TREES.items()
    }


@cache
def imported_ever() -> dict[str, set[str]]:
    """For each module the modules that it imports at any time, also for types alone."""
    return {
        name: set(imports(tree, everywhere=True)) & MODULES.keys() - {name}
        for name, tree in TREES.items()
    }


def closure(starts: Iterable[str], graph: dict[str, set[str]]) -> set[str]:
    """The modules that importing `starts` imports, with themselves."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(graph[name] - found)
    return found


def _is_later(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
