"""``quire serve --print-config``: prints the settings as a file that ``--config`` reads.

A comment after each setting says where it comes from.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from quire.cluster.cli.config_file import OF_COMMAND, ROUTING, SettingsFile, merged, read_file
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.settings import config_from, settings_of_cluster

_DEFAULT = "default"
_NOTHING = "# All settings are at their defaults; --print-config=all prints those too."
_OF_MODELS = [field.name for field in fields(ModelConfig)]
_FLAG_OF = {field: dest for dest, field in ROUTING.items()}
_OTHERWISE = {"model": "model", "api_keys_file": "api_keys"}
"""Flags that set a field with another name."""


def printed(arguments: argparse.Namespace, config: ClusterConfig, *, everything: bool) -> str:
    """The file's text. ``config`` results from ``arguments``. ``everything``: includes defaults."""
    file = None if arguments.config is None else read_file(arguments.config)
    names = list(config.models)
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
        for each in (dest, _OTHERWISE.get(name, dest)):
            if variable := self._arguments.variables.get(each):
                return str(variable)
            is_named = each in self._arguments.given or (each == "model" and self._arguments.model)
            if is_named:
                return f"--{each.replace('_', '-')}" if each != "model" else "MODEL"
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
