"""The documentation site builds without warnings, its generated pages are up to date with the code,
and strings that pages quote are in the code."""

import re
from pathlib import Path

import pytest
from tools.fields import documented_fields
from tools.reference.__main__ import PAGES, ROOT, written
from tools.reference.configuration import _SECTIONS, page

SOURCES = ("cluster", "kernels", "router", "worker")


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_that_of_the_code(page: str) -> None:
    assert (ROOT / page).read_text() == written(page), "run python -m tools.reference"


def test_every_setting_is_described() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    for config, _, _ in _SECTIONS.values():
        for field in documented_fields(config).values():
            assert field.description, f"{config.__name__}.{field.name}"
            assert f"| `{field.name}` " in page


def test_an_adapter_s_settings_are_given_no_flags_of_other_settings() -> None:
    (adapter,) = re.findall(r"## An adapter\n(.*)", page(), re.DOTALL)
    assert "`name` str" in adapter
    assert "Flag" not in adapter


def test_every_call_and_message_is_in_the_reference_of_grpc() -> None:
    page = (ROOT / "docs/grpc.md").read_text()
    for file in ("inference", "admin"):
        text = (ROOT / f"proto/quire/v1/{file}.proto").read_text()
        for name in re.findall(r"^\s*(?:message|enum|service|rpc) (\w+)", text, re.MULTILINE):
            assert re.search(rf"`(\w+\.)*{name}`", page), name
        fields = re.findall(r"^\s*(?:repeated |optional )?[\w.]+ (\w+) = \d+", text, re.MULTILINE)
        for name in fields:
            assert f"| `{name}` |" in page, name


def test_messages_that_troubles_are_told_by_are_in_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| (?:\d+, )?`([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 12
    code = source()
    for message in messages:
        assert message in code, message


def source() -> str:
    """All of our source on one line, with string literals that span lines joined."""
    texts = (path.read_text() for name in SOURCES for path in (ROOT / name).rglob("*.py"))
    return " ".join(re.sub(r'"\s*\n\s*f?"', "", " ".join(texts)).split())


def test_links_lead_to_pages_of_the_site_or_are_text() -> None:
    site = pytest.importorskip("tools.site", reason="mkdocs is not installed")
    see = site.on_page_markdown

    class Page:
        class file:
            src_uri = "operations.md"

    assert see("[a](../helm/README.md#upgrades)", Page) == "[a](kubernetes.md#upgrades)\n"
    assert see("[a](decisions/0010-eviction.md)", Page) == "[a](decisions/0010-eviction.md)\n"
    assert see("[a](../bench/results/kv.md)", Page) == "[a](results/kv.md)\n"
    assert see("[a](#b) [c](https://d.example)", Page) == "[a](#b) [c](https://d.example)\n"
    program = see("[a](../examples/block_sizes.py)", Page)
    assert program in ("a\n", f"[a]({site.repository()}/examples/block_sizes.py)\n")
    Page.file.src_uri = "results/kv.md"
    assert see("[a](../../docs/routing.md)", Page) == "[a](../routing.md)\n"
    assert see("text:\n- a\n- b\n```\nx\n- y\n```", Page) == "text:\n\n- a\n- b\n```\nx\n- y\n```\n"


@pytest.mark.slow
def test_the_site_is_built_without_a_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed")
    build = pytest.importorskip("mkdocs.commands.build")
    monkeypatch.chdir(ROOT)
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    pages = {str(path.relative_to(tmp_path).parent) for path in tmp_path.rglob("index.html")}
    assert {
        ".",
        "kubernetes",
        "configuration",
        "results/serving",
        "decisions/0010-eviction",
    } <= pages
    for path in (ROOT / "docs").rglob("*.md"):
        assert str(path.relative_to(ROOT / "docs").with_suffix("")) in pages
