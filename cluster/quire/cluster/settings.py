"""A cluster's configuration as a file gives it, such as the ``args`` of a Serve application."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.scaling.settings import AutoscalingSettings
from quire.router.config import RoutingConfig
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import ConfigError


def config_from(settings: Mapping[str, Any]) -> ClusterConfig:
    """Reads `ClusterConfig`'s fields by name, and under ``engine`` those of `EngineConfig`, under
    ``routing`` those of `RoutingConfig`, under ``autoscaling`` those of `AutoscalingSettings`.

    Without ``engine.model``, it is the demo model.

    Raises:
        ConfigError: A field is unknown or its value of the wrong type; or it cannot work.
    """
    engine, routing = (_section(settings, name) for name in ("engine", "routing"))
    settings = {**settings, "engine": engine, "routing": routing}
    if engine.get("model") is None:
        engine["model"] = demo_model.PATH
        settings["served_model_name"] = settings.get("served_model_name") or demo_model.NAME
    autoscaling = settings.get("autoscaling") or {}
    parts: list[tuple[str, Mapping[str, Any], type[Any]]] = [
        ("", settings, ClusterConfig),
        ("engine.", engine, EngineConfig),
        ("routing.", routing, RoutingConfig),
    ]
    if isinstance(autoscaling, Mapping):  # Else it is of the wrong type, as is said below.
        parts.append(("autoscaling.", autoscaling, AutoscalingSettings))
    for prefix, given, kind in parts:
        known = [field.name for field in fields(kind)]
        unknown = [f"{prefix}{name}" for name in given if name not in known]
        if unknown:
            raise ConfigError(f"{', '.join(unknown)}: unknown; there are {', '.join(known)}")
    try:
        return TypeAdapter(ClusterConfig).validate_python(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{place}={first['input']!r}: {first['msg']}") from error


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = settings.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r}: must be a mapping of settings to their values")
    return dict(given)
