"""Reads a cluster's settings from their sources. Of those that have a setting, the last wins:
defaults of the command, the file of ``--config``, its part for one model, variables, flags.

argparse reads variables as it reads flags (`quire.cluster.cli.environment`). All sources end in one
nested mapping for each model, of which `quire.cluster.settings.config_from` makes the
configuration.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from quire.cluster.cli.config_file import SettingsFile, read_file
from quire.cluster.cli.flags import Settings, check_autoscaling, given_settings
from quire.cluster.cli.lora import lora_modules
from quire.cluster.config import ClusterConfig, LoraModule, ModelConfig
from quire.cluster.deploy.kept_keys import kept_keys_file
from quire.cluster.settings import config_from, merged
from quire.worker.model.config import check_path
from quire.worker.model.hub import is_hub_name, model_name
from quire.worker.request.errors import CheckpointError, ConfigError

DEFAULT = "default"

Place = tuple[str, ...]
"""The section's name, if any, and the field's."""


class Layer(NamedTuple):
    """The settings of one source."""

    values: Settings
    origin: str
    """What is said of where they come from; empty for flags and variables, which tell."""


@dataclass(frozen=True)
class Sources:
    """A cluster's configuration, and what it was made of."""

    config: ClusterConfig
    layers: list[list[Layer]]
    """The sources of each model's settings; the last one wins."""
    arguments: argparse.Namespace

    def origin(self, model: int, place: Place) -> str:
        """Where the setting at ``place`` comes from, for the model of this number."""
        for values, origin in reversed(self.layers[model]):
            found: Any = values
            for part in place:
                found = found.get(part, ...) if isinstance(found, Mapping) else ...
            if found is not ...:
                return origin or flag_of(self.arguments, ".".join(place))
        return DEFAULT


def read_cluster(arguments: argparse.Namespace) -> Sources:
    """The configuration from the flags of `add_cluster_flags`, the environment and the file.

    Raises:
        ConfigError: They cannot work together; the message names the setting and the reason.
    """
    given = given_settings(arguments, ClusterConfig)
    file = SettingsFile() if arguments.config is None else read_file(arguments.config)
    file.fill(arguments)
    # With several nodes, gateways may run on other nodes than their groups.
    host = {"group_host": "auto"} if arguments.ray_address else {}
    base = Layer(merged(arguments.defaults, host), DEFAULT)
    over = [Layer(given, ""), Layer(_keys(arguments, given), "--api-key")]
    models = _models(arguments, file)
    names = [name for name, _ in models]
    adapters = lora_modules(arguments.lora_modules or (), models=names)
    layers = []
    for name, path in models:
        of_file = [Layer(each, str(file.path)) for each in file.of(name)]
        own = _of_model(arguments, name, path, adapters[name], is_only=len(models) == 1)
        layers.append([base, *of_file, *over, *own])
    settings = [merged(*(layer.values for layer in each)) for each in layers]
    for (name, path), each in zip(models, settings, strict=True):
        check_autoscaling(given, each)
        if path is None and name in file.own and not _has_model(each):
            raise ConfigError(
                f"--config {file.path}: models.{name} has no model: name a folder, a GGUF file or "
                "ORG/NAME of the hub in its engine.model"
            )
    first, *more = settings
    if more:
        known = {field.name for field in fields(ModelConfig)}
        first["more_models"] = [{name: each[name] for name in each.keys() & known} for each in more]
    return Sources(config_from(first), layers, arguments)


def check_paths(config: ClusterConfig) -> None:
    """Refuses a cluster of which no model is there, before the imports that the other checks need.
    Raises CheckpointError."""
    missing: list[CheckpointError] = []
    for each in config.each_model:
        try:
            if not is_hub_name(each.engine.model):
                check_path(each.engine.model)
        except CheckpointError as error:
            missing.append(error)
    if len(missing) == len(config.each_model):
        raise missing[0]


def _models(arguments: argparse.Namespace, file: SettingsFile) -> list[tuple[str, Path | None]]:
    """The clients' name of each model and its path; ``None`` stands for the file's or the demo
    model, whose name is "" unless it is given."""
    paths: list[Path] = arguments.model
    called: list[str] = arguments.served_model_name or []
    if not paths and file.own:
        if called:
            raise ConfigError(
                f"--served-model-name {called[0]}: --config {file.path} names its models, under "
                "`models`"
            )
        return [(name, None) for name in file.own]
    if not paths:
        return [(called[0] if called else "", None)]
    if len(paths) == 1:
        found = [called[0] if called else model_name(paths[0])]
    elif called and len(called) != len(paths):
        raise ConfigError(
            f"--served-model-name is given {len(called)} times for {len(paths)} models: give "
            "one for each, in their order, or none"
        )
    else:
        found = called or [model_name(path) for path in paths]
    if strangers := file.own.keys() - set(found):
        raise ConfigError(
            f"--config {file.path}: models.{min(strangers)} is none of the models given: "
            f"{', '.join(found)}"
        )
    return list(zip(found, paths, strict=True))


def _of_model(
    arguments: argparse.Namespace,
    name: str,
    path: Path | None,
    adapters: Iterable[LoraModule],
    *,
    is_only: bool,
) -> list[Layer]:
    """What the command line says of one model alone."""
    called: list[str] = arguments.served_model_name or []
    origin = flag_of(arguments, "served_model_name") if called else DEFAULT
    aliases = {"aliases": called[1:]} if called[1:] and is_only else {}
    modules = [asdict(each) for each in adapters]
    layers: list[tuple[object, Settings, str]] = [
        (name, {"served_model_name": name, **aliases}, origin),
        (path, {"engine": {"model": path}}, flag_of(arguments, "model")),
        (modules, {"lora_modules": modules}, flag_of(arguments, "lora_modules")),
    ]
    return [Layer(values, origin) for is_given, values, origin in layers if is_given]


def _has_model(settings: Settings) -> bool:
    engine = settings.get("engine") or {}
    return not isinstance(engine, Mapping) or engine.get("model") is not None


def _keys(arguments: argparse.Namespace, given: Settings) -> Settings:
    """The setting for the keys of ``--api-key``. Raises ConfigError if gateways could not find
    them."""
    if not arguments.api_keys:
        return {}
    if given.get("api_keys_file") or arguments.ray_address:
        raise ConfigError(
            "--api-key: put the keys into a file that each gateway's node has, and name it with "
            "--api-keys-file"
        )
    return {"api_keys_file": kept_keys_file(arguments.api_keys)}


def flag_of(arguments: argparse.Namespace, dest: str) -> str:
    """The variable, the flag or the file that has set the value of ``dest``."""
    if variable := arguments.variables.get(dest):
        return str(variable)
    if dest not in arguments.given:
        return str(arguments.config)
    if dest == "model":
        return "MODEL"
    flag = str(arguments.flags[dest.rpartition(".")[2]])
    is_off = getattr(arguments, dest) is False
    return f"--no-{flag.removeprefix('--')}" if is_off else flag
