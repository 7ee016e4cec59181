"""Options of an application's deployments for Serve: settings, numbers of replicas and versions.

An upgrade replaces the replicas of deployments whose version has changed. Without a version of
ours, Serve makes a new one for each deployment at each upgrade.
"""

import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import quire.cluster
import quire.kernels
import quire.router
import quire.worker
from quire.cluster.config import (
    ClusterConfig,
    GroupConfig,
    NumGateways,
    NumGroups,
    SharedSettings,
    UpgradeSettings,
)
from quire.cluster.features.autoscale.gateways import GatewayPolicy
from quire.cluster.features.autoscale.serve import ServePolicy
from quire.cluster.features.autoscale.settings import (
    LOOK_BACK_S,
    METRICS_INTERVAL_S,
    AutoscalingSettings,
    GatewayAutoscaling,
)
from quire.worker.model.hub import is_hub_name
from quire.worker.request.errors import ConfigError
from quire.worker.request.settings import part

OF_GROUPS = (GroupConfig, NumGroups, UpgradeSettings)
"""The settings that may stand in the ``args`` of groups."""


def group_config(config: ClusterConfig) -> GroupConfig:
    """What each group of the only model of ``config`` uses of the settings."""
    # `kv_transfer` depends on the number of groups unless it is set.
    engine = replace(config.engine, kv_transfer=config.transfers_kv)
    return part(GroupConfig, config, engine=engine)


def check_of_groups(names: Iterable[str]) -> None:
    """Raises ConfigError: ``names``, the ``args`` of groups, have settings that only gateways
    use."""
    known = {each.name for kind in OF_GROUPS for each in fields(kind)}
    all_names = {each.name for each in fields(ClusterConfig)}
    if others := [name for name in names if name in all_names - known]:
        raise ConfigError(
            f"{', '.join(others)}: only gateways use {'this' if len(others) == 1 else 'these'}; "
            "leave out of the args of groups, of which any change replaces the groups"
        )


def group_count(config: ClusterConfig) -> dict[str, Any]:
    """Serve's options for the number of groups: a number, or an autoscaling policy."""
    if (settings := config.autoscaling) is None:
        return {"num_replicas": config.num_groups}
    return _scaled(settings, ServePolicy, settings.min_groups, settings.max_groups)


def gateway_count(config: SharedSettings) -> dict[str, Any]:
    """Serve's options for the number of gateways: a number, or an autoscaling policy."""
    if (settings := config.gateway_autoscaling) is None:
        return {"num_replicas": config.num_gateways}
    return _scaled(settings, GatewayPolicy, settings.min_gateways, settings.max_gateways)


def _scaled(
    settings: AutoscalingSettings | GatewayAutoscaling,
    policy: type[ServePolicy | GatewayPolicy],
    fewest: int,
    most: int,
) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    with warnings.catch_warnings():
        # Ray 2.60 names environment variables as the successors of `metrics_interval_s`, but
        # reads the interval from nowhere else.
        warnings.simplefilter("ignore", DeprecationWarning)
        autoscaling = AutoscalingConfig(
            min_replicas=fewest,
            max_replicas=most,
            metrics_interval_s=METRICS_INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            # The policy has delays of its own.
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(
                policy_function=f"{policy.__module__}:{policy.__name__}",
                policy_kwargs=asdict(settings),
            ),
        )
    return {"autoscaling_config": autoscaling}


def group_version(config: ClusterConfig) -> str:
    """The version of a model's groups: a digest of the settings that they use, the model's files
    and this software. ``config`` is that of the model alone."""
    # Another number of groups must not replace the running ones.
    used = replace(group_config(config), engine=config.engine)
    return _digest(used, *_files(config.engine.model))


def gateway_version(config: SharedSettings) -> str:
    """The version of the gateways: a digest of the settings that are not a model's, and of this
    software."""
    counts = {field.name for field in fields(NumGateways)}
    settings = part(SharedSettings, config)
    return _digest([(name, value) for name, value in vars(settings).items() if name not in counts])


def with_version(deployment: Any, version: str) -> Any:
    """``deployment``, a `ray.serve.Deployment`, with ``version``. If Ray's deployments have no
    version, each upgrade replaces everything."""
    if hasattr(deployment, "_version"):
        deployment._version = version
    return deployment


def _files(model: Path) -> Iterator[tuple[str, int, int]]:
    """A local model's files, without hidden ones, such as the digests that Quire keeps beside
    weights. A model of the hub is identified by its commit instead."""
    if is_hub_name(model):
        return
    for file in sorted(model.rglob("*")) if model.is_dir() else [model]:
        if file.is_file() and not file.name.startswith("."):
            stat = file.stat()
            yield str(file), stat.st_size, stat.st_mtime_ns


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr((parts, _code_digest())).encode()).hexdigest()[:16]


@functools.cache
def _code_digest() -> str:
    state = hashlib.sha256()
    for package in (quire.cluster, quire.kernels, quire.router, quire.worker):
        for file in sorted(Path(package.__path__[0]).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                state.update(file.read_bytes())
    return state.hexdigest()
