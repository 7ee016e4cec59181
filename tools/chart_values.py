"""Generates the documentation of the chart's values: ``python -m tools.chart_values``.

The comments in ``helm/quire/values.yaml`` become the descriptions in ``values.schema.json``, which
editors show, and the table in ``helm/README.md``. Options of the engine and of routing get the
docstrings of their fields. ``--check`` only checks that both are up to date.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tools.fields import documented_fields

from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/quire"
_BEGIN, _END = "<!-- values -->\n", "<!-- end of values -->\n"
_COMMON = "pods"
_KINDS = ("head", "gateway", "groups")
_WHOLE = ("annotations", "resources")
"""Maps whose keys are defined by Kubernetes, not by the chart."""
_BY_FIELDS = {"engine": EngineConfig, "routing": RoutingConfig}


class Value(NamedTuple):
    path: str
    """The value's keys, joined by dots."""
    default: Any
    description: str
    is_leaf: bool


def values() -> list[Value]:
    """Every value of the chart, in the file's order, including maps that only contain others."""
    text = (CHART / "values.yaml").read_text()
    found = list(_walk(yaml.compose(text), yaml.safe_load(text), text.splitlines(), ""))
    common = {
        each.path.partition(".")[2]: each.description
        for each in found
        if each.path.startswith(f"{_COMMON}.")
    }
    return [_described_as(each, common) for each in found]


def _described_as(value: Value, common: dict[str, str]) -> Value:
    """The value, with the description of the corresponding value in `pods` if it has none."""
    kind, _, option = value.path.partition(".")
    if kind in _KINDS and not value.description:
        return value._replace(description=common.get(option, ""))
    return value


def _walk(node: Any, defaults: dict[str, Any], lines: list[str], place: str) -> Iterator[Value]:
    for key, child in node.value:
        path = f"{place}{key.value}"
        is_leaf = not isinstance(child, yaml.MappingNode) or child.flow_style or not child.value
        is_leaf = bool(is_leaf) or path in _BY_FIELDS or key.value in _WHOLE
        default = defaults[key.value]
        yield Value(path, default, _comment_above(lines, key.start_mark.line), is_leaf)
        if not is_leaf:
            yield from _walk(child, default, lines, f"{path}.")


def _comment_above(lines: list[str], number: int) -> str:
    said: list[str] = []
    while number and lines[number - 1].lstrip().startswith("#"):
        number -= 1
        said.insert(0, lines[number].strip().lstrip("# "))
        if said[0].startswith("-- "):
            break
    return " ".join(said).removeprefix("-- ")


def table() -> str:
    """A Markdown table with a row for each value."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    common = {each.path.partition(".")[2] for each in values() if each.path.startswith("pods.")}
    for each in values():
        kind, _, option = each.path.partition(".")
        if not each.is_leaf or (kind in _KINDS and option in common and not each.default):
            continue
        default = json.dumps(each.default, ensure_ascii=False)
        shown = f"`{default}`" if len(default) <= 60 else "see `values.yaml`"
        rows.append(f"| `{each.path}` | {shown} | {each.description.replace('|', chr(92) + '|')} |")
        if option == "resources" and kind in _KINDS:
            rows.append(f"| `{kind}`, options of `pods` | | For these pods alone. |")
    return "\n".join(rows) + "\n"


def schema() -> str:
    """``values.schema.json`` with the descriptions filled in."""
    whole: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    for each in values():
        place = whole
        for key in each.path.split("."):
            place = place["properties"][key]
        _describe(place, each.description)
    for section, config in _BY_FIELDS.items():
        for name, known in whole["properties"][section]["properties"].items():
            _describe(known, documented_fields(config)[name].description)
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _describe(known: dict[str, Any], description: str) -> None:
    """Sets the description as the first key of a value's schema."""
    others = {name: value for name, value in known.items() if name != "description"}
    known.clear()
    known.update({"description": description, **others} if description else others)


def readme() -> str:
    """``helm/README.md`` with the table filled in."""
    page = (ROOT / "helm/README.md").read_text()
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for path, text in (
        (CHART / "values.schema.json", schema()),
        (ROOT / "helm/README.md", readme()),
    ):
        if path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and stale:
        sys.exit(f"{', '.join(stale)}: stale; run python -m tools.chart_values")
    if missing := [each.path for each in values() if each.is_leaf and not each.description]:
        sys.exit(f"values.yaml says nothing of {', '.join(missing)}")


if __name__ == "__main__":
    main()
