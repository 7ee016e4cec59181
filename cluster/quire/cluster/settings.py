"""Converts a cluster's configuration from and to plain values, such as the ``args`` of a Serve
application in a file, or the list of models that gateways receive."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.features.autoscale.settings import AutoscalingSettings, GatewayAutoscaling
from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

_Config = TypeVar("_Config", bound=ModelConfig)
_PARTS: dict[str, type[Any]] = {
    "engine": EngineConfig,
    "routing": RoutingConfig,
    "autoscaling": AutoscalingSettings,
    "gateway_autoscaling": GatewayAutoscaling,
}


def config_from(settings: Mapping[str, Any]) -> ClusterConfig:
    """Reads `ClusterConfig`'s fields by name, and under ``engine`` those of `EngineConfig`, under
    ``routing`` those of `RoutingConfig`, under ``autoscaling`` those of `AutoscalingSettings`,
    under ``gateway_autoscaling`` those of `GatewayAutoscaling`. Each entry of the list
    ``more_models`` has the fields of `ModelConfig` likewise.

    Without ``engine.model``, the first model is the demo model.

    Raises:
        ConfigError: A field is unknown, or its value is of the wrong type or cannot work; or a
            further model has no ``engine.model``.
    """
    read = _read(settings, ClusterConfig, "")
    more = read.get("more_models")
    if isinstance(more, list | tuple):  # `_made` refuses any other type.
        read["more_models"] = [
            _read(_section({name: each}, name), ModelConfig, f"{name}.")
            for name, each in ((f"more_models.{number}", each) for number, each in enumerate(more))
        ]
        for number, each in enumerate(read["more_models"]):
            if each["engine"].get("model") is None:
                raise ConfigError(f"more_models.{number}.engine.model: is missing")
    return _made(ClusterConfig, read)


def model_from(settings: Mapping[str, Any]) -> ModelConfig:
    """Reads `ModelConfig`'s fields as `config_from` reads a cluster's. Raises ConfigError."""
    return _made(ModelConfig, _read(settings, ModelConfig, ""))


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """All fields of ``config`` as JSON values, from which `model_from` makes an equal one."""
    settings: dict[str, Any] = TypeAdapter(ModelConfig).dump_python(config, mode="json")
    return settings


def settings_of_cluster(config: ClusterConfig) -> dict[str, Any]:
    """All fields of ``config`` as JSON values, from which `config_from` makes an equal one."""
    settings: dict[str, Any] = TypeAdapter(ClusterConfig).dump_python(config, mode="json")
    return settings


def _made(kind: type[_Config], settings: Mapping[str, Any]) -> _Config:
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{place}={first['input']!r}: {first['msg']}") from error


def _read(settings: Mapping[str, Any], kind: type[Any], prefix: str) -> dict[str, Any]:
    """The settings of ``kind``. With an empty ``prefix``, which is that of further models, the demo
    model stands in for a missing model. Raises ConfigError: a setting is unknown."""
    engine, routing = (_section(settings, name) for name in ("engine", "routing"))
    settings = {**settings, "engine": engine, "routing": routing}
    if engine.get("model") is None and not prefix:
        engine["model"] = demo_model.PATH
        settings["served_model_name"] = settings.get("served_model_name") or demo_model.NAME
    parts = {f"{name}.": (settings.get(name), part) for name, part in _PARTS.items()}
    for name, (given, part) in ({"": (settings, kind)} | parts).items():
        if not isinstance(given, Mapping):  # `_made` refuses a wrong type later.
            continue
        known = [field.name for field in fields(part)]
        unknown = [f"{prefix}{name}{each}" for each in given if each not in known]
        if unknown:
            near = get_close_matches(unknown[0].rpartition(".")[2], known, n=1, cutoff=0.8)
            question = f"; is {near[0]} meant?" if near else ""
            raise ConfigError(
                f"{', '.join(unknown)}: unknown; there are {', '.join(known)}{question}"
            )
    return settings


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = settings.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r}: must be a mapping of settings to their values")
    return dict(given)
