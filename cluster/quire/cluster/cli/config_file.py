"""The file of ``--config``: settings of a cluster and of each of its models, in YAML or JSON.

It has the fields of `ClusterConfig`, those of a model among them, and under ``models`` the names
of models with what is theirs alone; ``name``, ``ray_address`` and ``status_interval_s`` are the
command's own. Any other key is a flag without its dashes, as in the files of ``vllm serve``, and
holds for all models. Flags that are given come before all of it.
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
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import ConfigError
from quire.worker.api.vllm_names import SPELLED
from quire.worker.model.hub import model_name

Settings = dict[str, Any]

OF_COMMAND: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "ray_address": (str,),
    "status_interval_s": (int, float),
}
"""Settings of the command itself, and their types."""
AUTOSCALING = ("min_groups", "max_groups", "target_ttft_s")
"""Flags that are fields of `AutoscalingSettings`."""
ROUTING = {
    "routing_policy": "policy",
    "directory": "use_directory",
    "prefill_groups": "num_prefill_groups",
}
"""Flags by destination, and the fields of `RoutingConfig` that they set."""
_ENGINE = {field.name for field in fields(EngineConfig)}
OF_ENGINE = _ENGINE - {"model"}

_SECTIONS = ("engine", "routing", "autoscaling", "gateway_autoscaling")
_FIELDS = {field.name for field in fields(ClusterConfig)} - {"served_model_name", "lora_modules"}
_OF_MODELS = {field.name for field in fields(ModelConfig)}
_TOP = {field.name for field in fields(ClusterConfig)} | {"models"}
_OF_ARGUMENTS = ("model", "served_model_name", "lora_modules", "api_keys")
"""Flags that are not a field each."""
_NOT_IN_FILES = ("help", "config", "print_config")


@dataclass(frozen=True)
class SettingsFile:
    """What a file says."""

    path: Path
    common: Settings
    """The cluster's, and those of each model."""
    own: dict[str, Settings]
    """Those of one model alone, by its name."""
    of_command: Settings
    """The command's own, and flags that are no field."""

    def fill(self, arguments: argparse.Namespace) -> None:
        """Puts what is the command's own where no flag was given."""
        for name, value in self.of_command.items():
            if name not in arguments.given:
                setattr(arguments, name, value)


def read_file(path: Path) -> SettingsFile:
    """Raises ConfigError: it cannot be read, or has a flag of vLLM's that is not served."""
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
    """``arguments.given`` names the flags that were given. ``names``: of each model of the command
    line, what clients call it and its further names; ``None`` is its own. ``group_host`` is used
    where neither says one, ``over`` whatever the file says.

    Raises:
        ConfigError: What the file and the flags say cannot work.
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
            # Groups run in other folders.
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
        return {}  # Nothing, or comments alone.
    if not isinstance(read, Mapping):
        raise ConfigError(f"--config {path}: must be a mapping of settings to their values")
    return {str(name): value for name, value in read.items()}


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
    """Takes those keys out of ``common`` that are flags; returns what they set, by destination.
    Raises ConfigError: one is of vLLM and not served."""
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
            continue  # No flag: its whole name is told later.
        del common[name]
        read = vars(parser.parse_args(arguments))
        found |= {dest: read[dest] for dest in read.keys() & {each.dest for each in actions}}
    return found


def _spelled(flag: str, value: object, action: argparse.Action | None) -> list[str]:
    """The arguments that give a flag this value; none for a switch that is off as it is."""
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
    """The settings that flags set, by destination."""
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
    """All settings; where several say the same one, the last holds."""
    merged: Settings = {}
    for settings in each:
        for name, value in settings.items():
            if name in _SECTIONS and isinstance(value, Mapping):
                before = merged.get(name)
                value = (dict(before) if isinstance(before, Mapping) else {}) | dict(value)
            merged[name] = value
    return merged
