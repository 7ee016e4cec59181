"""The list of models that gateways serve. It is the ``user_config`` of their deployment, which
Serve passes to each new gateway, and to running ones when it changes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.deploy.names import part_of
from quire.cluster.deploy.serve_options import group_version
from quire.cluster.settings import model_from, settings_of


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One model in the list."""

    settings: ModelConfig
    part: str
    """The part of the name of its groups' application: see `quire.cluster.deploy.names`."""
    version: str = ""
    """The version of its groups, which changes with the model's files and settings."""
    trouble: str = ""
    """Why the model has no groups; empty if it has."""

    @property
    def name(self) -> str:
        return self.settings.model_name


def listed_in(
    config: ClusterConfig,
    *,
    parts: Mapping[str, str] | None = None,
    troubles: Mapping[str, str] | None = None,
) -> list[Listed]:
    """The models of ``config``, in its order. ``parts``: the parts of models that are served
    already. ``troubles``: why models cannot be served. Both are by name."""
    found = []
    for each in config.each_model:
        name = each.model_name
        trouble = (troubles or {}).get(name, "")
        found.append(
            Listed(
                settings=each,
                part=(parts or {}).get(name, part_of(name)),
                version="" if trouble else group_version(config.serving(each)),
                trouble=trouble,
            )
        )
    return found


def to_json(models: Iterable[Listed]) -> dict[str, Any]:
    return {
        "models": [
            {
                "settings": settings_of(each.settings),
                "part": each.part,
                "version": each.version,
                "trouble": each.trouble,
            }
            for each in models
        ]
    }


def from_json(told: Mapping[str, Any]) -> list[Listed]:
    """Decodes `to_json`. Raises ConfigError: the settings are of another version of Quire."""
    return [Listed(**{**each, "settings": model_from(each["settings"])}) for each in told["models"]]
