"""Rules of imports within the router and from the worker."""

import re
from pathlib import Path

import quire.router.table

ROUTER = Path(quire.router.table.__file__).parent
OF_WORKER = {
    f"quire.worker.{name}"
    for name in (
        *("blocks.events", "blocks.hashing"),
        *("request.errors", "request.outputs", "request.settings"),
    )
}


def imports(path: Path) -> set[str]:
    return set(re.findall(r"^\s*(?:from|import) (quire\.[\w.]+)", path.read_text(), re.MULTILINE))


def test_the_router_knows_little_of_the_worker() -> None:
    modules = list(ROUTER.rglob("*.py"))
    assert len(modules) > 10
    for path in modules:
        of_worker = {name for name in imports(path) if name.startswith("quire.worker")}
        assert of_worker <= OF_WORKER, path


def test_nothing_of_the_router_needs_the_engine_or_a_model() -> None:
    engine = {
        "quire.worker.engine.engine",
        "quire.worker.engine.scheduler",
        "quire.worker.rank.runner",
    }
    for path in ROUTER.rglob("*.py"):
        assert not imports(path) & engine, path
        assert "import torch" not in path.read_text(), path
