"""A cluster's configuration as plain values: what a file gives, such as the ``args`` of a Serve
application, and what gateways are told of their models."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.scaling.settings import AutoscalingSettings, GatewayAutoscaling
from quire.router.config import RoutingConfig
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import ConfigError

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
    under ``gateway_autoscaling`` those of `GatewayAutoscaling`; in the list ``more_models``, the
    same of `ModelConfig`.

    Without ``engine.model``, the first model is the demo model.

    Raises:
        ConfigError: A field is unknown or its value of the wrong type; a further model has no
            ``engine.model``; or it cannot work.
    """
    read = _read(settings, ClusterConfig, "")
    more = read.get("more_models")
    if isinstance(more, list | tuple):  # Else it is of the wrong type, as is said below.
        read["more_models"] = [
            _read(_section({name: each}, name), ModelConfig, f"{name}.")
            for name, each in ((f"more_models.{number}", each) for number, each in enumerate(more))
        ]
        for number, each in enumerate(read["more_models"]):
            if each["engine"].get("model") is None:
                raise ConfigError(f"more_models.{number}.engine.model: is missing")
    return _made(ClusterConfig, read)


def model_from(settings: Mapping[str, Any]) -> ModelConfig:
    """The same for `ModelConfig`'s fields. Raises ConfigError."""
    return _made(ModelConfig, _read(settings, ModelConfig, ""))


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """All its fields as values of JSON, of which `model_from` makes an equal one."""
    settings: dict[str, Any] = TypeAdapter(ModelConfig).dump_python(config, mode="json")
    return settings


def settings_of_cluster(config: ClusterConfig) -> dict[str, Any]:
    """The same of a cluster, for `config_from`."""
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
    """The settings of ``kind``; with the demo model if they name none, and are those of the first
    model. Raises ConfigError: one is unknown."""
    engine, routing = (_section(settings, name) for name in ("engine", "routing"))
    settings = {**settings, "engine": engine, "routing": routing}
    if engine.get("model") is None and not prefix:
        engine["model"] = demo_model.PATH
        settings["served_model_name"] = settings.get("served_model_name") or demo_model.NAME
    parts = {f"{name}.": (settings.get(name), part) for name, part in _PARTS.items()}
    for name, (given, part) in ({"": (settings, kind)} | parts).items():
        if not isinstance(given, Mapping):  # If it is of the wrong type, it is told later.
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
