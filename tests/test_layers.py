"""Which packages may import which: the table of the design, and no import cycles."""

from graphlib import TopologicalSorter

import pytest
from tests.modules import (
    MODULES,
    ROOT,
    TREES,
    imported_at_start,
    imported_ever,
    imports,
    root_of,
)

MAY_IMPORT = {
    "kernels": set[str](),
    "proto": set[str](),
    "worker": {"kernels"},
    "router": {"kernels", "worker"},  # tests/router/test_imports.py limits these further.
    "cluster": {"kernels", "proto", "router", "worker"},
}
"""Allowed imports by source root; each root may also import itself."""
OF_GATEWAYS = (
    *("anthropic", "autoscale", "embeddings", "explain", "guard", "kv_events", "live"),
    *("reference", "responses", "template_reading", "tenants", "tracing", "vllm_grpc", "watcher"),
)
"""Features that have no part in a group's engine."""
WORKER_API = ("quire.worker.blocks", "quire.worker.request")
MAY_IMPORT_OF_THE_WORKER = {
    "quire.router": WORKER_API,
    "quire.simulate": (*WORKER_API, "quire.worker.cache"),
    # A gateway also needs the tokenizer.
    **dict.fromkeys(
        [f"quire.cluster.{name}" for name in ("edge", "gateway", "links", "serving", "telemetry")]
        + [f"quire.cluster.features.{name}" for name in OF_GATEWAYS],
        (*WORKER_API, "quire.worker.text"),
    ),
}
"""The worker's packages that a package may import. Packages not listed may import any."""
MAY_IMPORT_IN_THE_WORKER = {
    "blocks": set[str](),
    "request": {"blocks"},
    "weights": {"request"},
    "model": {"request", "weights"},
    "text": {"blocks", "request", "weights", "model"},
    "step": {"blocks", "request"},
    "cache": {"blocks", "request"},
    "engine": {"blocks", "request", "model", "step", "cache"},
    "parts": {"blocks", "request", "weights", "model", "text", "step", "cache", "engine"},
    "rank": {"blocks", "request", "weights", "model", "step", "parts"},
}
"""Allowed imports by room of the worker, at import time; its modules may also import each other.
Who asks the engine for tokens, such as `quire.llm`, may import any."""
MAY_NAME_FOR_TYPES = {"request": {"model", "text"}, "weights": {"model"}}
MOST_FILES, MOST_LINES = 16, 2_500
"""The most files and lines that the folder `engine` may have: one reads it in an hour."""
FEATURES = "quire.cluster.features"
KNOWS_RAY = {"cluster", "router/quire/router/serve_router.py"}


@pytest.mark.parametrize("root", MAY_IMPORT)
def test_a_folder_imports_only_what_the_design_lets_it(root: str) -> None:
    found = {name: path for name, path in MODULES.items() if root_of(path) == root}
    assert found
    for module, path in found.items():
        names = set(imports(TREES[module], everywhere=True))
        used = {root_of(MODULES[name]) for name in names & MODULES.keys()}
        assert used <= MAY_IMPORT[root] | {root}, path
        if not KNOWS_RAY & {root, str(path.relative_to(ROOT))}:
            assert not {name for name in names if name.split(".")[0] == "ray"}, path


def package_of(name: str) -> str:
    """A module's package; a module beside packages is its own."""
    if name.startswith("quire.kernels."):
        return name  # Its folders say how kernels compute, and are no layers.
    return ".".join(name.split(".")[:3])


def room_of(name: str) -> str:
    """A worker's room: `quire.worker.model.families.llama` is in `model`."""
    parts = name.split(".")
    return parts[2] if name.startswith("quire.worker.") else ""


@pytest.mark.parametrize("room", MAY_IMPORT_IN_THE_WORKER)
def test_a_room_of_the_worker_imports_only_what_the_design_lets_it(room: str) -> None:
    may, at_start, ever = (
        MAY_IMPORT_IN_THE_WORKER[room] | {room},
        imported_at_start(),
        imported_ever(),
    )
    found = [name for name in MODULES if room_of(name) == room]
    assert found
    for name in found:
        assert {room_of(each) for each in at_start[name]} - {""} <= may, name
        named = {room_of(each) for each in ever[name]} - {""}
        assert named <= may | MAY_NAME_FOR_TYPES.get(room, set()), name


def test_the_engine_is_small_and_imports_no_part() -> None:
    files = [path for name, path in MODULES.items() if room_of(name) == "engine"]
    assert len(files) <= MOST_FILES
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES


def test_no_modules_import_each_other() -> None:
    list(TopologicalSorter(imported_at_start()).static_order())  # CycleError names the cycle.


def test_no_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, imported in imported_at_start().items():
        others = {package_of(other) for other in imported if not _is_package(other)}
        # A feature's folder has parts of several packages; test_features counts who imports them.
        others -= {FEATURES}
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
        tree = TREES[name]
        imported = set(imports(tree, everywhere=True)) & MODULES.keys()
        of_worker = {package_of(each) for each in imported if each.startswith("quire.worker.")}
        assert of_worker <= set(MAY_IMPORT_OF_THE_WORKER[package]), name


def _is_package(name: str) -> bool:
    return MODULES[name].name == "__init__.py"
