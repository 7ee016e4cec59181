"""Files, headings, modules and benchmarks that the documentation names exist."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from quire.cluster.config import ClusterConfig
from quire.cluster.settings import settings_in
from quire.cluster.tools.run_batch.file import Limits

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
OURS = re.compile(r"python -m (quire[\w.]*\w)")
FLAG = re.compile(r"`(?:[^`\n]* )?(--[a-z][\w-]*)")
PATH = re.compile(
    r"`((?:bench|cluster|docs|helm|kernels|proto|router|tests|tools|worker)/[\w./-]*\w)`"
)
MODULES = ROOT / "cluster/quire/cluster"

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


@by_page
def test_our_modules_can_be_run(page: Path) -> None:
    for name in set(OURS.findall(page.read_text())):
        assert module_of(name) or module_of(f"{name}.__main__"), name


@by_page
def test_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for found in PATH.finditer(text):
        is_gone = "last in " in text[max(0, found.start() - 120) : found.start()]  # In git only.
        assert is_gone or (ROOT / found[1]).exists(), found[1]


@by_page
def test_flags_are_read_somewhere(page: Path) -> None:
    source = sources()
    kinds = (ClusterConfig, Limits)
    of_settings = {each.flag for kind in kinds for each in settings_in(kind)}
    for flag in set(FLAG.findall(page.read_text())):
        positive = flag.replace("--no-", "--", 1)
        is_read = any(f'"{name}"' in source for name in (flag, positive))
        assert positive in of_settings or is_read, flag


def test_the_map_of_the_cluster_has_a_row_for_each_package() -> None:
    page = (ROOT / "docs/design.md").read_text()
    page = page.partition("### Where the code is")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?:`(\w+)`|\(itself\)) \| [^|]+ \| ([^|]+) \|$", page, re.M)
    assert {name for name, _ in rows if name} == {
        path.parent.name for path in MODULES.glob("*/__init__.py")
    }
    (features,) = re.findall(r"^\| `features` \| ([^|]+) \|", page, re.M)
    assert set(re.findall(r"`(\w+)`", features)) == {
        path.parent.name for path in MODULES.glob("features/*/__init__.py")
    }
    for package, modules in rows:
        for module in re.findall(r"`(\w+)`", modules):
            assert (MODULES / package / f"{module}.py").exists(), f"{package} {module}"


@cache
def sources() -> str:
    folders = (
        "bench",
        "client",
        "cluster",
        "helm",
        "kernels",
        "router",
        "tests",
        "tools",
        "worker",
    )
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(path.read_text() for path in files)


def anchors(page: Path) -> set[str]:
    """The anchor of each heading, in the form that web viewers generate."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def module_of(name: str) -> Path | None:
    """The file of a module, found without running it."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # The parent does not exist or is no package.
        return None
    return Path(spec.origin) if spec and spec.origin else None
