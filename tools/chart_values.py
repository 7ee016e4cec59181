"""Generates the documentation of the chart's values: ``python -m tools.chart_values``.

The comments in ``helm/quire/values.yaml`` become the descriptions in ``values.schema.json``, which
editors show, and the table in ``helm/README.md``. All options below ``settings``, ``engine`` and
``routing`` come from the fields of the settings' classes, and so does ``templates/_settings.tpl``,
which says which of them groups and further models get. ``--check`` only checks that all are up to
date.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter
from tools.fields import documented_fields

from quire.cluster.config import (
    ClusterConfig,
    ModelConfig,
    SharedSettings,
)
from quire.cluster.deploy.serve_options import OF_GROUPS
from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/quire"
_BEGIN, _END = "<!-- values -->\n", "<!-- end of values -->\n"
_COMMON = "pods"
_KINDS = ("head", "gateway", "groups")
_WHOLE = ("annotations", "resources")
"""Maps whose keys are defined by Kubernetes, not by the chart."""
_BY_FIELDS = {"settings": ClusterConfig, "engine": EngineConfig, "routing": RoutingConfig}
OWN_VALUES: Mapping[tuple[str, ...], str] = {
    ("api_keys_file",): "gateway.apiKeys",
    ("autoscaling",): "groups.autoscaling",
    ("chat_template",): "gateway.chatTemplate",
    ("cpus_per_group",): "groups.cpusPerGroup",
    ("drain_timeout_s",): "gateway.drainSeconds",
    ("engine",): "engine",
    ("engine", "model"): "model",
    ("engine", "tensor_parallel_size"): "groups.tensorParallelSize",
    ("gateway_autoscaling",): "gateway.autoscaling",
    ("grpc_port",): "gateway.ports.grpc",
    ("http_port",): "gateway.ports.http",
    ("lora_modules",): "loraModules",
    ("metrics_port",): "gateway.ports.metrics",
    ("more_models",): "moreModels",
    ("nodes_per_group",): "groups.nodesPerGroup",
    ("num_gateways",): "gateway.replicas",
    ("num_groups",): "groups.replicas",
    ("open_metrics",): "gateway.openMetrics",
    ("routing",): "routing",
    ("served_model_name",): "model.servedName",
    ("start_first",): "upgrade.startFirst",
    ("tls_certificate",): "gateway.tls",
    ("tls_key",): "gateway.tls",
}
"""Settings on which Kubernetes' objects depend, and their values. All others stand below
``settings``."""
_DECIDED = ("host", "group_host", "gateway_resource", "group_resource")
"""Settings that the chart decides."""
_NOT_SHOWN = ("default", "format", "title")
_OF_ONE_MODEL = (
    *("aliases", "autoscaling", "chat_template", "engine", "lora_modules", "num_groups"),
    "served_model_name",
)
"""Settings of the first model that further models do not take from it."""


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
        known = whole["properties"][section]["properties"]
        made = _options_of(section, config)
        for name in known.keys() - made.keys():
            del known[name]
        for name, option in made.items():
            _describe(known.setdefault(name, option), documented_fields(config)[name].description)
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _options_of(section: str, config: type) -> dict[str, Any]:
    """The schema of each setting of ``config`` that may stand in a section of the values."""
    place = () if section == "settings" else (section,)
    own = {path[-1] for path in OWN_VALUES if path[:-1] == place}
    return {
        name: {key: each for key, each in option.items() if key not in _NOT_SHOWN}
        for name, option in TypeAdapter(config).json_schema()["properties"].items()
        if name not in own and name not in _DECIDED
    }


def template() -> str:
    """``templates/_settings.tpl``."""
    shared, of_models = (
        {each.name for each in fields(kind)} for kind in (SharedSettings, ModelConfig)
    )
    of_groups = {each.name for kind in OF_GROUPS for each in fields(kind)}
    lists = {
        "quire.groupsOfCluster": (shared & of_groups, "What groups get of the shared settings."),
        "quire.groupsOfModel": (of_models & of_groups, "What groups get of their model's."),
        "quire.commonOfModels": (
            of_models - {*_OF_ONE_MODEL},
            "What further models have like the first one, unless they say otherwise.",
        ),
    }
    texts = ["{{/* Made by python -m tools.chart_values from the classes of settings. */}}\n"]
    for name, (names, text) in lists.items():
        texts.append(f'\n{{{{/* {text} */}}}}\n{{{{- define "{name}" -}}}}\n')
        texts.append(" ".join(sorted(names)) + "\n{{- end -}}\n")
    return "".join(texts)


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
        (CHART / "templates/_settings.tpl", template()),
    ):
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and stale:
        sys.exit(f"{', '.join(stale)}: stale; run python -m tools.chart_values")
    if missing := [each.path for each in values() if each.is_leaf and not each.description]:
        sys.exit(f"values.yaml says nothing of {', '.join(missing)}")


if __name__ == "__main__":
    main()
