"""``quire serve --print-config``: prints the settings as a file that ``--config`` reads.

A comment after each setting says where it comes from.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from quire.cluster.cli.config_file import OF_COMMAND, ROUTING, SettingsFile, merged, read_file
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.settings import config_from, settings_of_cluster

_DEFAULT = "default"
_NOTHING = "# All settings are at their defaults; --print-config=all prints those too."
_OF_MODELS = [field.name for field in fields(ModelConfig)]
_FLAG_OF = {field: dest for dest, field in ROUTING.items()}
_KEYS = "# API keys are left out: put them into a file, and name it as api_keys_file."


def printed(arguments: argparse.Namespace, config: ClusterConfig, *, everything: bool) -> str:
    """The file's text. ``config`` results from ``arguments``. ``everything``: includes defaults."""
    file = None if arguments.config is None else read_file(arguments.config)
    names = list(config.models)
    if config.served_model_name is None:
        config = replace(config, served_model_name=names[0])
    origins = _Origins(arguments, file, names[0])
    settings = settings_of_cluster(config)
    defaults = settings_of_cluster(config_from({}))
    lines = [
        f"{name}: {_written(getattr(arguments, name))}  # {origin}"
        for name in OF_COMMAND
        if (origin := origins.of(name)) != _DEFAULT
    ]
    more = settings.pop("more_models")
    first = {name: settings.pop(name) for name in _OF_MODELS} if more else {}
    if arguments.api_keys:
        del settings["api_keys_file"]  # It is there only while they are served.
        lines.append(_KEYS)
    lines += _lines(settings, defaults, origins, everything=everything)
    if more:
        lines.append("models:")
        for name, each in zip(names, (first, *more), strict=True):
            del each["served_model_name"]
            of_model = _Origins(arguments, file, name)
            below = _lines(each, defaults, of_model, everything=everything)
            lines += [f"  {_written(name)}:", *(f"    {line}" for line in below)]
    return "".join(f"{line}\n" for line in lines or [_NOTHING])


class _Origins:
    """Finds the origin of settings of the cluster and of one model."""

    def __init__(
        self, arguments: argparse.Namespace, file: SettingsFile | None, model: str
    ) -> None:
        self._arguments = arguments
        self._file: Mapping[str, Any] = {}
        if file is not None:
            self._file = merged(file.of_command, file.common, file.own.get(model, {}))

    def of(self, *path: str) -> str:
        """The origin of a field. ``path``: the section's name, if any, and the field's."""
        name = path[-1]
        dest = _FLAG_OF.get(name, name) if path[0] == "routing" else name
        if variable := self._arguments.variables.get(dest):
            return str(variable)
        if dest == "model" and self._arguments.model:
            return "MODEL"
        if dest in self._arguments.given:
            flag = str(self._arguments.flags[dest])
            is_off = getattr(self._arguments, dest) is False
            return f"--no-{flag.removeprefix('--')}" if is_off else flag
        found: Any = self._file
        for part in path:
            found = found.get(part, MISSING) if isinstance(found, Mapping) else MISSING
        return _DEFAULT if found is MISSING else str(self._arguments.config)


def _lines(
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    origins: _Origins,
    *,
    everything: bool,
    path: tuple[str, ...] = (),
) -> Iterator[str]:
    for name, value in settings.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and not path:
            below = [*_lines(value, default or {}, origins, everything=everything, path=(name,))]
            if below:
                yield f"{name}:"
                yield from (f"  {line}" for line in below)
            continue
        origin = origins.of(*path, name)
        if origin == _DEFAULT and value != default:
            origin = "follows from the others"
        if everything or origin != _DEFAULT:
            yield f"{name}: {_written(value)}  # {origin}"


def _written(value: object) -> str:
    return json.dumps(value, default=str)
