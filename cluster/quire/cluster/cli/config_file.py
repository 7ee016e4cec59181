"""The file of ``--config``: settings of a cluster and of each of its models, in YAML or JSON.

It has the fields of `ClusterConfig`, which include a model's. Under ``models`` it has the names of
models, with the settings of that model alone. ``name``, ``ray_address`` and ``status_interval_s``
belong to the command itself. Any other key is a flag without its dashes, as in the files of ``vllm
serve``, and applies to all models. Flags on the command line override the file.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from quire.cluster.cli.flags import Settings, from_flag, put
from quire.cluster.cli.vllm_flags import origins, own_flag
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.settings import merged, settings_in
from quire.cluster.unique_keys import read_yaml
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.request.vllm_names import VALUES

OF_COMMAND = ("name", "ray_address", "status_interval_s")
"""Settings of the command itself."""
_OF_COMMAND: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "--name": ("name", (str,)),
    "--ray-address": ("ray_address", (str,)),
    "--status-interval-s": ("status_interval_s", (int, float)),
    "--model": ("model", (list,)),
    "--served-model-name": ("served_model_name", (list,)),
    "--lora-modules": ("lora_modules", (list,)),
    "--api-key": ("api_keys", (list,)),
}
"""Flags of the command itself, with their destinations and types."""
_TOP = {each.name for each in fields(ClusterConfig)}


@dataclass(frozen=True)
class SettingsFile:
    """The settings in a file, or none."""

    path: Path | None = None
    common: Settings = field(default_factory=dict)
    """Settings of the cluster, and of all models."""
    own: dict[str, Settings] = field(default_factory=dict)
    """Settings of single models, by the model's name."""
    of_command: Settings = field(default_factory=dict)
    """Values of the command's own flags, by destination."""

    def of(self, model: str) -> tuple[Settings, Settings]:
        """The settings of a model; the last ones win."""
        return self.common, self.own.get(model, {})

    def fill(self, arguments: argparse.Namespace) -> None:
        """Sets the command's own flags in ``arguments``, except those that were given."""
        for name, value in self.of_command.items():
            if name not in arguments.given:
                setattr(arguments, name, value)


def read_file(path: Path) -> SettingsFile:
    """Reads a file. Raises ConfigError if it cannot be read, or has a flag of vLLM's that is not
    served."""
    common = _read(path)
    own = _models_of(common, path)
    try:
        flags, of_command = _flags_of(common)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return SettingsFile(path, merged(flags, common), own, of_command)


def _flags_of(common: Settings) -> tuple[Settings, Settings]:
    """Removes the flags from ``common``; returns the settings that they stand for, and the values
    of the command's own flags. Unknown ones stay, to be refused by their full names. Raises
    ConfigError: a flag of vLLM's is not served, or a value has the wrong type."""
    settings: Settings = {}
    of_command: Settings = {}
    flags = {each.flag: each for each in settings_in(ClusterConfig) if each.flag}
    for key in [each for each in common if each not in _TOP]:
        flag, value = f"--{key.replace('_', '-')}", common[key]
        if value is False and flag not in flags:
            flag, value = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}", True
        ours = own_flag(flag, {*flags, *_OF_COMMAND})
        if ours is None:
            del common[key]
            continue
        if ours in VALUES and isinstance(value, str):
            value = VALUES[ours].get(value, value)
        elif ours == "--revision":
            raise ConfigError(f"{key}={value}: spell the model MODEL@{value}")
        elif ours == "--allowed-origins":
            ours, value = (
                "--allow-origin",
                value if isinstance(value, list) else origins(str(value)),
            )
        positive = f"--{ours.removeprefix('--no-')}"
        if ours.startswith("--no-") and positive in flags and flags[positive].kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{key}={value!r}: must be true or false")
            ours, value = positive, not value
        if ours in flags:
            setting = flags[ours]
            is_list = get_origin(setting.kind) is not tuple or isinstance(value, list)
            put(settings, setting.path, from_flag(setting, value if is_list else [value]))
        elif ours in _OF_COMMAND:
            name, kinds = _OF_COMMAND[ours]
            of_command[name] = _checked(key, value, kinds)
        else:
            continue
        del common[key]
    return settings, of_command


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """The value of a flag of the command. Raises ConfigError: it has another type."""
    if list in kinds:
        values = value if isinstance(value, list) else [value]
        if not values or any(each in (None, "") or isinstance(each, bool) for each in values):
            raise ConfigError(f"{name}={value!r}: must be text, or a list of texts")
        texts = [json.dumps(each) if isinstance(each, Mapping) else str(each) for each in values]
        return [Path(each) for each in texts] if name == "model" else texts
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be {'text' if str in kinds else 'a number'}")
    return value


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
    known = sorted({each.name for each in fields(ModelConfig)} - {"served_model_name"})
    engine = {each.name for each in fields(EngineConfig)}
    for name, settings in own.items():
        if unknown := settings.keys() - known:
            stranger = sorted(unknown)[0]
            question = f"; is engine.{stranger} meant?" if stranger in engine else ""
            raise ConfigError(
                f"--config {path}: models.{name}.{stranger}: unknown for a model; there are "
                f"{', '.join(known)}{question}"
            )
    if "more_models" in common:
        raise ConfigError(f"--config {path}: more_models: name each model under `models`")
    return own
