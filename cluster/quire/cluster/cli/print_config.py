"""``quire serve --print-config``: prints the settings as a file that ``--config`` reads.

A comment after each setting says where it comes from.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from quire.cluster.cli.config_file import OF_COMMAND
from quire.cluster.cli.sources import DEFAULT, Place, Sources, flag_of
from quire.cluster.config import ModelConfig
from quire.cluster.settings import config_from, settings_of

_NOTHING = "# All settings are at their defaults; --print-config=all prints those too."
_KEYS = "# API keys are left out: put them into a file, and name it as api_keys_file."


def printed(sources: Sources, *, everything: bool) -> str:
    """The file's text. ``everything``: includes defaults."""
    arguments = sources.arguments
    settings, defaults = settings_of(sources.config), settings_of(config_from({}))
    names = list(sources.config.models)
    settings["served_model_name"] = names[0]
    lines = [
        f"{name}: {_written(value)}  # {flag_of(arguments, name)}"
        for name in OF_COMMAND
        if (value := getattr(arguments, name)) is not None
    ]
    more = settings.pop("more_models")
    of_models = [field.name for field in fields(ModelConfig)]
    first = {name: settings.pop(name) for name in of_models} if more else {}
    if arguments.api_keys:
        del settings["api_keys_file"]  # It is there only while they are served.
        lines.append(_KEYS)
    lines += _lines(settings, defaults, sources, everything=everything)
    if more:
        lines.append("models:")
        for number, (name, each) in enumerate(zip(names, (first, *more), strict=True)):
            del each["served_model_name"]
            below = _lines(each, defaults, sources, number, everything=everything)
            lines += [f"  {_written(name)}:", *(f"    {line}" for line in below)]
    return "".join(f"{line}\n" for line in lines or [_NOTHING])


def _lines(
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    sources: Sources,
    model: int = 0,
    *,
    everything: bool,
    path: Place = (),
) -> Iterator[str]:
    for name, value in settings.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and not path:
            below = [
                *_lines(value, default or {}, sources, model, everything=everything, path=(name,))
            ]
            if below:
                yield f"{name}:"
                yield from (f"  {line}" for line in below)
            continue
        origin = sources.origin(model, (*path, name))
        if origin == DEFAULT and value != default:
            origin = "follows from the others"
        if everything or origin != DEFAULT:
            yield f"{name}: {_written(value)}  # {origin}"


def _written(value: object) -> str:
    return json.dumps(value, default=str)
