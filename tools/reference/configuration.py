"""Generates the page of settings: of the cluster, of each model, its engine, routing, autoscaling.

Each row has the flag of ``quire serve``, the value of the chart, the type and the default.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.fields import DocumentedField, documented_fields
from tools.reference.markdown import code, table

from quire.cluster.cli.commands import command_line
from quire.cluster.config import ClusterConfig, LoraModule, ModelConfig
from quire.cluster.features.autoscale.settings import AutoscalingSettings, GatewayAutoscaling
from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig

_CHART = Path(__file__).resolve().parents[2] / "helm/quire/templates/_helpers.tpl"
_SECTIONS: Mapping[str, tuple[type, str, str]] = {
    "The cluster": (ClusterConfig, "", "The settings of the first model stand beside these."),
    "A model": (
        ModelConfig,
        "",
        "The first model's stand beside the cluster's settings, those of others in `more_models`.",
    ),
    "An engine": (EngineConfig, "engine", "Below `engine`: the engine of each replica group."),
    "Routing": (RoutingConfig, "routing", "Below `routing`."),
    "Autoscaling": (AutoscalingSettings, "groups.autoscaling", "Below `autoscaling`."),
    "Autoscaling of gateways": (
        GatewayAutoscaling,
        "gateway.autoscaling",
        "Below `gateway_autoscaling`.",
    ),
    "An adapter": (LoraModule, "", "Each of `lora_modules`."),
}
_FLAGS = {
    "allow_origins": "--allow-origin",
    "policy": "--routing-policy",
    "use_directory": "--no-directory",
    "num_prefill_groups": "--prefill-groups",
}
"""Flags whose name differs from that of their setting."""
_VALUES = {
    "api_keys_file": "gateway.apiKeys",
    "cpus_per_group": "groups.cpusPerGroup",
    "lora_modules": "loraModules",
    "max_connections_per_address": "gateway.connections.maxPerAddress",
    "model": "model",
    "more_models": "moreModels",
    "num_gateways": "gateway.replicas",
    "num_groups": "groups.replicas",
    "open_metrics": "gateway.openMetrics",
    "served_model_name": "model.servedName",
    "tensor_parallel_size": "groups.tensorParallelSize",
    "tls_certificate": "gateway.tls",
    "tls_key": "gateway.tls",
}
"""Values of the chart that its template does not pass on unchanged."""


def page() -> str:
    parts = []
    for title, (config, chart, text) in _SECTIONS.items():
        own = documented_fields(config)
        if config is ClusterConfig:
            own = {name: each for name, each in own.items() if name not in _model_fields()}
        # Those of an adapter stand within the one flag --lora-modules.
        rows = [_row(each, chart, has_flag=config is not LoraModule) for each in own.values()]
        header = ("setting", "default", "meaning")
        parts.append(f"## {title}\n{text}\n\n{table(header, rows)}\n")
    return "".join(parts)


def _row(field: DocumentedField, chart: str, *, has_flag: bool) -> tuple[str, str, str]:
    name = field.name
    said = [re.sub(r"``([^`]+)``", r"`\1`", field.description)]
    if has_flag and (flag := _flag(name)):
        said.append(f"Flag: `{flag}`.")
    if value := _value(name, chart):
        said.append(f"Chart: `{value}`.")
    kind = field.annotation.replace('"', "").replace(" | ", " or ")
    return f"{code(name)} {kind}", _default(field.default), " ".join(said)


def _flag(name: str) -> str:
    flags = _serve_flags().get(name, [])
    return _FLAGS.get(name) or next((flag for flag in flags if flag.startswith("--")), "")


@cache
def _serve_flags() -> dict[str, list[str]]:
    (commands,) = (
        each for each in command_line()._actions if isinstance(each, argparse._SubParsersAction)
    )
    return {each.dest: each.option_strings for each in commands.choices["serve"]._actions}


def _value(name: str, chart: str) -> str:
    if name in _VALUES:
        return _VALUES[name]
    if chart in ("engine", "routing"):
        return f"{chart}.{name}"
    value = _template_values().get(name, "")
    return f"{chart}{value}" if value.startswith(".") else value


@cache
def _template_values() -> dict[str, str]:
    """The chart's value that its template passes on, by setting."""
    text = _CHART.read_text()
    values = {}
    found = re.findall(r'"(\w+)" \(?(?:int )?(\.Values|\$\w+)?(\.[\w.]+)', text)
    places = {"$gateway": "gateway", "$admission": "admission", "$failover": "failover"}
    for setting, place, value in found:
        values[setting] = (places.get(place, "") + value).removeprefix(".") if place else value
    for place, value, setting in re.findall(
        r'with (\$\w+)(\.[\w.]+) }}{{ \$_ := set \$settings "(\w+)"', text
    ):
        values[setting] = places[place] + value
    return values


def _default(default: Any) -> str:
    if default is MISSING:
        return "must be given"
    if is_dataclass(default):
        return "see below"
    if default is None:
        return ""
    return code(str(list(default)) if isinstance(default, tuple) else str(default))


@cache
def _model_fields() -> frozenset[str]:
    return frozenset(documented_fields(ModelConfig))
