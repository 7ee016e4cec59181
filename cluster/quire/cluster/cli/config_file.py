"""The file of ``--config``: settings of a cluster and of each of its models, in YAML or JSON.

It has the fields of `ClusterConfig`, those of a model among them, and under ``models`` the names
of models with what is theirs alone. Flags that are given come before all of it.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from quire.cluster.cli.fields import chat_template
from quire.cluster.cli.lora import lora_modules
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.settings import config_from
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import ConfigError
from quire.worker.model.hub import model_name

Settings = dict[str, Any]

_SECTIONS = ("engine", "routing", "autoscaling", "gateway_autoscaling")
_FIELDS = {field.name for field in fields(ClusterConfig)} - {"served_model_name", "lora_modules"}
_OF_ENGINE = {field.name for field in fields(EngineConfig)} - {"model"}
_ROUTING = {
    "routing_policy": "policy",
    "directory": "use_directory",
    "prefill_groups": "num_prefill_groups",
}
_OF_MODELS = {field.name for field in fields(ModelConfig)}


def config_from_file(
    arguments: argparse.Namespace, names: Sequence[Sequence[str | None]], *, group_host: str
) -> ClusterConfig:
    """``arguments.given`` names the flags that were given. ``names``: of each model of the command
    line, what clients call it and its further names; ``None`` is its own. ``group_host`` is used
    where neither says one.

    Raises:
        ConfigError: The file cannot be read, or what it and the flags say cannot work.
    """
    path = arguments.config
    common = _read(path)
    own = _models_of(common, path)
    common.setdefault("group_host", group_host)
    paths = {
        name or model_name(model): model
        for model, (name, *_) in zip(arguments.model, names, strict=True)
    }
    if strangers := own.keys() - (paths or own).keys():
        raise ConfigError(
            f"--config {path}: models.{min(strangers)} is none of the models given: "
            f"{', '.join(paths)}"
        )
    models = []
    for name in paths or own or [None]:
        settings = _merged(common, own.get(name or "", {}), _flags(arguments))
        if name in paths:
            settings = _merged(settings, {"engine": {"model": str(paths[name])}})
        models.append(settings | ({"served_model_name": name} if name else {}))
    if "lora_modules" in arguments.given:
        known = [each.get("served_model_name") or "" for each in models]
        given = lora_modules(arguments.lora_modules, models=known)
        for each, modules in zip(models, given.values(), strict=True):
            each["lora_modules"] = [asdict(module) for module in modules]
    if len(names) == 1 == len(paths) and names[0][1:]:
        models[0]["aliases"] = names[0][1:]
    first, *more = models
    of_model = [{key: each[key] for key in each.keys() & _OF_MODELS} for each in more]
    return config_from(first | ({"more_models": of_model} if of_model else {}))


def _read(path: Path) -> Settings:
    import yaml

    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {error}") from error
    if not isinstance(read, Mapping):
        raise ConfigError(f"--config {path}: must be a mapping of settings to their values")
    return dict(read)


def _models_of(common: Settings, path: Path) -> dict[str, Settings]:
    """Takes what is each model's own out of ``common``."""
    models = common.pop("models", None) or {}
    if not isinstance(models, Mapping) or not all(
        each is None or isinstance(each, Mapping) for each in models.values()
    ):
        raise ConfigError(
            f"--config {path}: models={models!r}: must be a mapping of names to settings"
        )
    own = {str(name): dict(each or {}) for name, each in models.items()}
    known = sorted(_OF_MODELS - {"served_model_name"})
    for name, settings in own.items():
        if unknown := settings.keys() - known:
            raise ConfigError(
                f"--config {path}: models.{name}.{sorted(unknown)[0]}: unknown for a model; there "
                f"are {', '.join(known)}"
            )
    if "more_models" in common:
        raise ConfigError(f"--config {path}: more_models: name each model under `models`")
    return own


def _flags(arguments: argparse.Namespace) -> Settings:
    """The settings of the flags that were given."""
    settings: Settings = {}
    for name in arguments.given:
        value = getattr(arguments, name)
        if name in _OF_ENGINE:
            settings.setdefault("engine", {})[name] = value
        elif name in ("min_groups", "max_groups", "target_ttft_s"):
            settings.setdefault("autoscaling", {})[name] = value
        elif name in _ROUTING:
            settings.setdefault("routing", {})[_ROUTING[name]] = value
        elif name == "chat_template":
            settings[name] = chat_template(value)
        elif name in _FIELDS:
            settings[name] = value
    return settings


def _merged(*each: Mapping[str, Any]) -> Settings:
    """All settings; where several say the same one, the last holds."""
    merged: Settings = {}
    for settings in each:
        for name, value in settings.items():
            if name in _SECTIONS and isinstance(value, Mapping):
                before = merged.get(name)
                value = (dict(before) if isinstance(before, Mapping) else {}) | dict(value)
            merged[name] = value
    return merged
