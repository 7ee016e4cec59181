"""What the documents name is there: files, headings, modules, benchmarks."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md")]
    + [
        page
        for folder in ("docs", "helm", "bench/results")
        for page in (ROOT / folder).rglob("*.md")
    ]
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MODULE = re.compile(r"`(quire\.(?:cluster|kernels|llm|router|worker)[\w.]*)")
COMMAND = re.compile(r"python -m ((?:bench|tools)[\w.]*\w)")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, heading in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not heading or heading in anchors(target), f"{path}#{heading}"


@by_page
def test_modules_and_their_names_are_there(page: Path) -> None:
    for name in set(MODULE.findall(page.read_text())):
        owner, _, last = name.rpartition(".")
        source = module_of(name) or module_of(owner)
        assert source is not None, name
        assert module_of(name) or re.search(rf"\b{last}\b", source.read_text()), name


@by_page
def test_benchmarks_can_be_run(page: Path) -> None:
    for name in set(COMMAND.findall(page.read_text())):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def anchors(page: Path) -> set[str]:
    """The anchor of each heading, as web viewers make it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def module_of(name: str) -> Path | None:
    """The file of a module, which is not run."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # What it is said to be in is none, or no package.
        return None
    return Path(spec.origin) if spec and spec.origin else None
