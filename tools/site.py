"""Builds a site from the repository's pages with ``mkdocs`` (see ``mkdocs.yml``).

Pages outside ``docs/`` are added. A link points to a page of the site if its target is one, else to
the repository if ``pyproject.toml`` names it, else it becomes plain text.
"""

import re
import tomllib
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = {
    "README.md": "index.md",
    "helm/README.md": "kubernetes.md",
    "client/README.md": "client.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages outside ``docs/`` and their places in the site; all results are added to these."""
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Adds every decision and every result to the navigation, in order."""
    for section in config.nav:
        if not isinstance(section, dict):
            continue
        for pages in section.values():
            for page in pages:
                if isinstance(page, dict) and "Decisions" in page:
                    page["Decisions"] = [
                        f"decisions/{path.name}"
                        for path in sorted((ROOT / "docs/decisions").glob("*.md"))
                    ]
            if "benchmarks.md" in pages:
                pages += sorted(place for place in outside().values() if "/" in place)
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, place in outside().items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    source = next((each for each, its in outside().items() if its == place), f"docs/{place}")
    return spaced(_LINK.sub(lambda link: _led(link, source, place), markdown))


@cache
def outside() -> dict[str, str]:
    """Places in the site of pages outside ``docs/``, by path in the repository."""
    results = {
        f"bench/results/{path.name}": f"results/{path.name}"
        for path in sorted((ROOT / "bench/results").glob("*.md"))
    }
    return _OUTSIDE | results


def _led(link: re.Match[str], source: str, place: str) -> str:
    """A link on the repository's page ``source``, rewritten for the site's page ``place``."""
    text, path, anchor = link[1], link[2], link[3] or ""
    if not path:
        return link[0]
    target = normpath(str(PurePosixPath(source).parent / path))
    there = outside().get(target) or (
        target.removeprefix("docs/") if target.startswith("docs/") else None
    )
    if there and there.endswith(".md"):
        return f"[{text}]({relpath(there, PurePosixPath(place).parent)}{anchor})"
    return f"[{text}]({repository()}/{target}{anchor})" if repository() else text


@cache
def repository() -> str | None:
    """The URL of the repository's files, if the project has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    url = urls.get("repository") or urls.get("source")
    return f"{url.rstrip('/')}/blob/main" if url else None


def spaced(markdown: str) -> str:
    """The page without comments and with an empty line before each list and table, which Python's
    Markdown needs."""
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        if line.startswith("<!--"):
            line = ""
        before = lines[-1] if lines else ""
        is_code ^= line.lstrip().startswith("```")
        begins = re.match(r"[-*] |\d+\. |\|", line)
        if (
            begins
            and not is_code
            and before.strip()
            and not re.match(r"\s|[-*] |\d+\. |\|", before)
        ):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"
