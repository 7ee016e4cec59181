"""Generates the page of settings: of the cluster, of each model, its engine, routing, autoscaling.

Each row has the flag of ``quire serve``, the type and the default. It has the value of the chart if
that is not `settings`.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from functools import cache
from typing import Any

from tools.chart_values import OWN_VALUES
from tools.fields import DocumentedField, documented_fields
from tools.reference.markdown import code, table

from quire.cluster.config import ClusterConfig, LoraModule, ModelConfig
from quire.cluster.features.autoscale.settings import AutoscalingSettings, GatewayAutoscaling
from quire.cluster.settings import Setting, settings_in
from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig

_SECTIONS: Mapping[str, tuple[type, str | None, str]] = {
    "The cluster": (ClusterConfig, "", "The settings of the first model stand beside these."),
    "A model": (
        ModelConfig,
        "",
        "The first model's stand beside the cluster's settings, those of others in `more_models`.",
    ),
    "An engine": (EngineConfig, "engine", "Below `engine`: the engine of each replica group."),
    "Routing": (RoutingConfig, "routing", "Below `routing`."),
    "Autoscaling": (AutoscalingSettings, "autoscaling", "Below `autoscaling`."),
    "Autoscaling of gateways": (
        GatewayAutoscaling,
        "gateway_autoscaling",
        "Below `gateway_autoscaling`.",
    ),
    "An adapter": (LoraModule, None, "Each of `lora_modules`."),
}
"""Each with its class and the section of the settings that it is; ``None`` for none."""

_OF_COMMAND = {"served_model_name": "--served-model-name", "lora_modules": "--lora-modules"}
"""Flags that set more than one setting."""


def page() -> str:
    parts = []
    of_models = documented_fields(ModelConfig).keys()
    for title, (config, section, text) in _SECTIONS.items():
        own = documented_fields(config)
        if config is ClusterConfig:
            own = {name: each for name, each in own.items() if name not in of_models}
        rows = [_row(each, section) for each in own.values()]
        header = ("setting", "default", "meaning")
        parts.append(f"## {title}\n{text}\n\n{table(header, rows)}\n")
    return "".join(parts)


def _row(field: DocumentedField, section: str | None) -> tuple[str, str, str]:
    name = field.name
    path = (section, name) if section else (name,)
    setting = _settings().get(path) if section is not None else None
    text = setting.text if setting is not None else field.description
    said = [re.sub(r"``([^`]+)``", r"`\1`", text)]
    if setting is not None and (flag := setting.flag or _OF_COMMAND.get(name)):
        said.append(f"Flag: `{flag}`.")
    if section is not None and (value := OWN_VALUES.get(path)):
        said.append(f"Chart: `{value}`.")
    kind = field.annotation.replace('"', "").replace(" | ", " or ")
    return f"{code(name)} {kind}", _default(field.default), " ".join(said)


@cache
def _settings() -> dict[tuple[str, ...], Setting]:
    return {each.path: each for each in settings_in(ClusterConfig)}


def _default(default: Any) -> str:
    if default is MISSING:
        return "must be given"
    if is_dataclass(default):
        return "see below"
    if default is None:
        return ""
    return code(str(list(default)) if isinstance(default, tuple) else str(default))
