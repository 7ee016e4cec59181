"""Parses ``--lora-modules`` in vLLM's forms: ``name=path``, or a JSON object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.cluster.cli.flags import absolute
from quire.cluster.config import LoraModule
from quire.cluster.unique_keys import read_json
from quire.worker.request.errors import ConfigError

_FIELDS = {"name", "path", "base_model_name"}


def lora_modules(
    given: Sequence[str], *, models: Sequence[str]
) -> dict[str, tuple[LoraModule, ...]]:
    """The adapters of each of ``models``, the names of the served models.

    Raises:
        ConfigError: One has neither form, or names no model although there are several.
    """
    found: dict[str, list[LoraModule]] = {model: [] for model in models}
    for text in given:
        name, path, model = _of_json(text) if text.startswith("{") else _parted(text, models)
        if not name or not path:
            raise ConfigError(f"--lora-modules {text}: write it as NAME=PATH")
        if model is None and len(found) > 1:
            raise ConfigError(
                f"--lora-modules {text}: says not which of {', '.join(found)} it is for; write "
                "NAME=PATH@MODEL"
            )
        model = model or models[0]
        if model not in found:
            raise ConfigError(
                f"--lora-modules {text}: {model!r} is not served; there are {', '.join(found)}"
            )
        found[model].append(LoraModule(name=name, path=str(absolute(Path(path)))))
    return {model: tuple(modules) for model, modules in found.items()}


def _parted(text: str, models: Sequence[str]) -> tuple[str, str, str | None]:
    """Splits an entry. The text after the last ``@`` is a model, or else a revision on the hub."""
    name, _, path = text.partition("=")
    before, _, model = path.rpartition("@")
    return (name, before, model) if model in models and before else (name, path, None)


def _of_json(text: str) -> tuple[str, str, str | None]:
    try:
        said: dict[str, Any] = read_json(text)
    except ValueError as error:
        raise ConfigError(f"--lora-modules {text}: is no JSON: {error}") from None
    if not said.keys() <= _FIELDS or not all(isinstance(each, str) for each in said.values()):
        raise ConfigError(f"--lora-modules {text}: its fields are texts: {', '.join(_FIELDS)}")
    return said.get("name", ""), said.get("path", ""), said.get("base_model_name")
