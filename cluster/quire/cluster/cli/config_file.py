"""The file of ``--config``: settings of a cluster and of each of its models, in YAML or JSON.

It has the fields of `ClusterConfig`, which include a model's. Under ``models`` it has the names of
models, with the settings of that model alone. ``name``, ``ray_address`` and ``status_interval_s``
belong to the command itself. Any other key is a flag without its dashes, as in the files of ``vllm
serve``, and applies to all models. Flags on the command line override the file.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quire.cluster.cli.fields import chat_template
from quire.cluster.cli.help import Parser
from quire.cluster.cli.lora import lora_modules
from quire.cluster.cli.vllm_flags import translated
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.settings import config_from
from quire.cluster.unique_keys import read_yaml
from quire.worker.model.hub import model_name
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.request.vllm_names import SPELLED

Settings = dict[str, Any]

OF_COMMAND: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "ray_address": (str,),
    "status_interval_s": (int, float),
}
"""Settings of the command itself, with their types."""
AUTOSCALING = ("min_groups", "max_groups", "target_ttft_s")
"""Flags that set fields of `AutoscalingSettings`."""
ROUTING = {
    "routing_policy": "policy",
    "directory": "use_directory",
    "prefill_groups": "num_prefill_groups",
}
"""Flags by destination, with the fields of `RoutingConfig` that they set."""
_ENGINE = {field.name for field in fields(EngineConfig)}
OF_ENGINE = _ENGINE - {"model"}

_SECTIONS = ("engine", "routing", "autoscaling", "gateway_autoscaling")
_FIELDS = {field.name for field in fields(ClusterConfig)} - {"served_model_name", "lora_modules"}
_OF_MODELS = {field.name for field in fields(ModelConfig)}
_TOP = {field.name for field in fields(ClusterConfig)} | {"models"}
_OF_ARGUMENTS = ("model", "served_model_name", "lora_modules", "api_keys")
"""Flags that do not correspond to one field each."""
_NOT_IN_FILES = ("help", "config", "print_config")


@dataclass(frozen=True)
class SettingsFile:
    """The settings in a file."""

    path: Path
    common: Settings
    """Settings of the cluster, and of all models."""
    own: dict[str, Settings]
    """Settings of single models, by the model's name."""
    of_command: Settings
    """Settings of the command itself, and flags that are not fields."""

    def fill(self, arguments: argparse.Namespace) -> None:
        """Sets the command's own settings in ``arguments``, except where a flag was given."""
        for name, value in self.of_command.items():
            if name not in arguments.given:
                setattr(arguments, name, value)


def read_file(path: Path) -> SettingsFile:
    """Reads a file. Raises ConfigError if it cannot be read, or has a flag of vLLM's that is not
    served."""
    common = _read(path)
    own = _models_of(common, path)
    of_command = {name: common.pop(name) for name in OF_COMMAND if name in common}
    for name, value in of_command.items():
        if not isinstance(value, OF_COMMAND[name]) or isinstance(value, bool):
            kind = "text" if str in OF_COMMAND[name] else "a number"
            raise ConfigError(f"--config {path}: {name}={value!r}: must be {kind}")
    flags = _flags_of(common, path)
    of_command |= {name: flags.pop(name) for name in (*_OF_ARGUMENTS, *OF_COMMAND) if name in flags}
    return SettingsFile(path, merged(_settings(flags), common), own, of_command)


def config_from_file(
    arguments: argparse.Namespace,
    file: SettingsFile,
    names: Sequence[Sequence[str | None]],
    *,
    group_host: str,
    over: Settings,
) -> ClusterConfig:
    """The configuration from the file and the flags. ``arguments.given`` names the flags that were
    given. ``names``: for each model of the command line, its name for clients and its aliases;
    ``None`` stands for the model's own name. ``group_host`` applies if neither file nor flags set
    it; ``over`` overrides the file.

    Raises:
        ConfigError: The file and the flags together cannot work.
    """
    path, own = file.path, file.own
    common = {"group_host": group_host} | file.common
    paths = {
        name or model_name(model): model
        for model, (name, *_) in zip(arguments.model, names, strict=True)
    }
    if strangers := own.keys() - (paths or own).keys():
        raise ConfigError(
            f"--config {path}: models.{min(strangers)} is none of the models given: "
            f"{', '.join(paths)}"
        )
    given = _settings({name: getattr(arguments, name) for name in arguments.given})
    models = []
    for name in paths or own or [None]:
        settings = merged(common, own.get(name or "", {}), given, over)
        if name in paths:
            settings = merged(settings, {"engine": {"model": str(paths[name])}})
        engine = settings.get("engine") or {}
        if name and isinstance(engine, Mapping) and engine.get("model") is None:
            raise ConfigError(
                f"--config {path}: models.{name} has no model: name a folder, a GGUF file or "
                "ORG/NAME of the hub in its engine.model"
            )
        if isinstance(engine, dict) and isinstance(engine.get("kv_disk_dir"), str | Path):
            # Groups run in other working directories.
            engine["kv_disk_dir"] = Path(engine["kv_disk_dir"]).absolute()
        models.append(settings | ({"served_model_name": name} if name else {}))
    if arguments.lora_modules:
        known = [each.get("served_model_name") or "" for each in models]
        modules_of = lora_modules(arguments.lora_modules, models=known)
        for each, modules in zip(models, modules_of.values(), strict=True):
            each["lora_modules"] = [asdict(module) for module in modules]
    called = arguments.served_model_name or []
    if called and not paths:
        if own:
            raise ConfigError(
                f"--served-model-name {called[0]}: --config {path} names its models, under `models`"
            )
        models[0]["served_model_name"] = called[0]
    if called[1:] and len(models) == 1:
        models[0]["aliases"] = called[1:]
    first, *more = models
    of_model = [{key: each[key] for key in each.keys() & _OF_MODELS} for each in more]
    return config_from(first | ({"more_models": of_model} if of_model else {}))


def _read(path: Path) -> Settings:
    try:
        read = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {error}") from error
    if read is None:
        return {}  # Empty, or only comments.
    if not isinstance(read, Mapping):
        raise ConfigError(f"--config {path}: must be a mapping of settings to their values")
    return {str(name): value for name, value in read.items()}


def _models_of(common: Settings, path: Path) -> dict[str, Settings]:
    """Removes the settings of single models from ``common`` and returns them by the model's
    name."""
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
            stranger = sorted(unknown)[0]
            question = f"; is engine.{stranger} meant?" if stranger in _ENGINE else ""
            raise ConfigError(
                f"--config {path}: models.{name}.{stranger}: unknown for a model; there are "
                f"{', '.join(known)}{question}"
            )
    if "more_models" in common:
        raise ConfigError(f"--config {path}: more_models: name each model under `models`")
    return own


def _flags_of(common: Settings, path: Path) -> Settings:
    """Removes the flags from ``common`` and returns the values that they set, by destination.
    Raises ConfigError if a flag of vLLM's is not served."""
    from quire.cluster.cli.cluster import add_serve_flags

    parser = Parser(prog=f"quire serve: --config {path}")
    add_serve_flags(parser)
    actions = [each for each in parser._actions if each.dest not in _NOT_IN_FILES]
    known = {flag: action for action in actions for flag in action.option_strings}
    for action in actions:
        action.default = argparse.SUPPRESS
    found: Settings = {}
    for name in [each for each in common if each not in _TOP]:
        flag = f"--{name.replace('_', '-')}"
        flag = SPELLED.get(flag, flag)
        try:
            arguments, _ = translated(_spelled(flag, common[name], known.get(flag)), known)
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error
        if arguments and name != "model" and arguments[0].partition("=")[0] not in known:
            continue  # Not a flag: reported later by its full name.
        del common[name]
        read = vars(parser.parse_args(arguments))
        found |= {dest: read[dest] for dest in read.keys() & {each.dest for each in actions}}
    return found


def _spelled(flag: str, value: object, action: argparse.Action | None) -> list[str]:
    """The arguments that set a flag to this value; none for a switch that is off anyway."""
    if isinstance(value, bool):
        if value or f"--no-{flag[2:]}" in getattr(action, "option_strings", [f"--no-{flag[2:]}"]):
            return [flag if value else f"--no-{flag[2:]}"]
        return []
    values = value if isinstance(value, list) else [value]
    texts = [json.dumps(each) if isinstance(each, Mapping) else str(each) for each in values]
    if action is not None and action.nargs in ("+", "*"):
        return [flag, *texts]
    return [f"{flag}={text}" for text in texts]


def _settings(flags: Mapping[str, Any]) -> Settings:
    """The settings from the values of flags, given by destination."""
    settings: Settings = {}
    for name, value in flags.items():
        if name in OF_ENGINE:
            settings.setdefault("engine", {})[name] = value
        elif name in AUTOSCALING:
            settings.setdefault("autoscaling", {})[name] = value
        elif name in ROUTING:
            settings.setdefault("routing", {})[ROUTING[name]] = value
        elif name == "chat_template":
            settings[name] = chat_template(value)
        elif name in _FIELDS:
            settings[name] = value
    return settings


def merged(*each: Mapping[str, Any]) -> Settings:
    """All settings combined; for equal names, the last one wins."""
    merged: Settings = {}
    for settings in each:
        for name, value in settings.items():
            if name in _SECTIONS and isinstance(value, Mapping):
                before = merged.get(name)
                value = (dict(before) if isinstance(before, Mapping) else {}) | dict(value)
            merged[name] = value
    return merged
