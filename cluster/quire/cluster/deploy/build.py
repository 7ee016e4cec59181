"""Builds the Serve applications of a cluster: its gateways, and the groups of each model."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.cluster.config import ClusterConfig, GroupModel, LogSettings, ModelConfig, SharedSettings
from quire.cluster.deploy.listed import Listed, to_json
from quire.cluster.deploy.serve_options import (
    gateway_count,
    gateway_version,
    group_config,
    group_count,
    group_version,
    with_version,
)
from quire.cluster.deploy.stop import STOP_MARGIN_S
from quire.cluster.features.adapters.node import NodeAdapters
from quire.cluster.features.guard.limits import GRPC_LEAVE_S
from quire.cluster.features.nodes.placement import placement_options
from quire.cluster.features.tracing.tracing import protocol_to
from quire.worker.model.config import (
    check_settings,
    read_model_spec,
)
from quire.worker.model.hub import fetch_text_files, is_hub_name, pinned
from quire.worker.parts.tiers.disk import check_folder
from quire.worker.rank.kv import check_memory_here
from quire.worker.request.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    InvalidRequest,
    QuireError,
)
from quire.worker.request.settings import part
from quire.worker.text.tokenizer import Tokenizer
from quire.worker.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray import serve

    from quire.cluster.deploy.deployments import Gateway, ReplicaGroup

_COMMON: dict[str, Any] = {
    "graceful_shutdown_wait_loop_s": 0.1,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    # A replica that fails three times in a row will not recover by itself, and is reported.
    "max_constructor_retry_count": 3,
}
_GATEWAY_HEALTH_TIMEOUT_S = 60.0
"""On a starved machine, a gateway that works may answer late by any time. Serve would replace it
after three late answers, and the new one would start for minutes there. `deploy.watcher` ends a
gateway that really hangs, and Serve sees at once when a process has ended."""


def build_gateways(
    config: SharedSettings, models: Iterable[Listed], *, gateway: "type[Gateway] | None" = None
) -> "serve.Application":
    """The application of the gateways. They serve ``models``.

    ``gateway`` is a subclass of `deployments.Gateway` to run instead of it.
    """
    from ray import serve

    from quire.cluster.deploy import deployments

    gateways = with_version(
        serve.deployment(
            **gateway_count(config),
            ray_actor_options={"num_cpus": 0, "resources": _one_of(config.gateway_resource)},
            graceful_shutdown_timeout_s=GRPC_LEAVE_S + config.drain_timeout_s + STOP_MARGIN_S,
            # One new gateway starts before an old one stops, so that a single one leaves no gap,
            # unless a resource limits their number.
            max_surge_percent=int(config.start_first or config.gateway_resource is None),
            user_config=to_json(models),
            logging_config=_logging(config),
            **_COMMON | {"health_check_timeout_s": _GATEWAY_HEALTH_TIMEOUT_S},
        )(gateway or deployments.Gateway),
        gateway_version(config),
    )
    app: serve.Application = gateways.bind(part(SharedSettings, config))
    return app


def build_groups(
    config: ClusterConfig, part: str, *, group: "type[ReplicaGroup] | None" = None
) -> "serve.Application":
    """The application of the groups of the only model of ``config``; ``part`` is their part of the
    application's name.

    ``group`` is a subclass of `deployments.ReplicaGroup` to run instead of it.
    """
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from quire.cluster.deploy import deployments
    from quire.router.serve_router import PrefixAwareRouter

    groups = with_version(
        serve.deployment(
            **group_count(config),
            **placement_options(config, on_gpu=is_on_gpu(config, ray.cluster_resources())),
            # The engine queues and batches calls through handles, which Serve's default of 5 would
            # prevent.
            max_ongoing_requests=config.engine.max_num_waiting,
            request_router_config=RequestRouterConfig(
                request_router_class=PrefixAwareRouter,  # type: ignore[arg-type]
                request_router_kwargs={"pool": deployments.pool_of(part)},
            ),
            graceful_shutdown_timeout_s=config.drain_timeout_s + STOP_MARGIN_S,
            # Serve rounds a percentage up: 1 % of up to a hundred replicas is one.
            max_surge_percent=int(config.start_first),
            logging_config=_logging(config),
            **_COMMON,
        )(group or deployments.ReplicaGroup),
        group_version(config),
    )
    app: serve.Application = groups.bind(group_config(config))
    return app


def build_parts(
    config: SharedSettings, models: Iterable[Listed], *, group: "type[ReplicaGroup] | None" = None
) -> "dict[str, serve.Application]":
    """The applications of the groups of all ``models`` without trouble, by part."""
    return {
        each.part: build_groups(config.serving(each.settings), each.part, group=group)
        for each in models
        if not each.trouble
    }


def checked(config: ClusterConfig) -> tuple[ClusterConfig, dict[str, QuireError]]:
    """Checks, before anything starts, for errors that would make every group of a model fail.
    Returns the settings, in which models of the hub are pinned to their current commit, and the
    errors of models that fail.

    All files of a model of the hub except its weights are fetched: the weights may only be needed
    on other nodes.

    Raises:
        ConfigError: The settings cannot work for any of the models, or spans cannot be sent as
            configured.
        CheckpointError: None of the models can be read.
    """
    protocol_to(config.otlp_traces_endpoint)
    models: list[ModelConfig] = []
    failed: dict[str, QuireError] = {}
    for each in config.each_model:
        try:
            each = replace(each, engine=replace(each.engine, model=pinned(each.engine.model)))
            _check(config.serving(each))
        except (ConfigError, CheckpointError) as error:
            failed[each.model_name] = error
        models.append(each)
    if len(failed) == len(models):
        raise next(iter(failed.values()))
    return config.serving(*models), failed


def check_here(
    config: ClusterConfig, failed: dict[str, QuireError], *, machine: Mapping[str, float]
) -> None:
    """Checks the device, memory and disk of this machine, on which groups will run, for models
    that have not ``failed``, and adds those that fail. ``machine`` has its resources for Ray.
    Raises ConfigError: none of the models can run here."""
    for name, model in config.models.items():
        if name not in failed:
            try:
                _check_here(model, machine)
            except ConfigError as error:
                failed[name] = error
    if len(failed) == len(config.models):
        raise next(iter(failed.values()))


def _check_here(config: ClusterConfig, machine: Mapping[str, float]) -> None:
    engine, on_gpu = config.engine, is_on_gpu(config, machine)
    engine.check_device("cuda" if on_gpu else "cpu")
    if engine.kv_disk_dir is not None:
        check_folder(engine.kv_disk_dir)
    if not on_gpu:
        folder = fetch_text_files(engine.model)
        check_memory_here(engine, read_model_spec(folder, model_impl=engine.model_impl))


def _check(config: ClusterConfig) -> None:
    engine = config.engine
    folder = fetch_text_files(engine.model)
    model = read_model_spec(folder, model_impl=engine.model_impl)
    check_settings(engine, model)
    Tokenizer.load(folder, chat_template=config.chat_template)
    if not is_hub_name(engine.model):
        open_checkpoint(engine.model)
    for module in config.lora_modules:
        try:
            NodeAdapters(engine, chat_template=config.chat_template).keep(module.path)
        except (AdapterError, InvalidRequest) as error:
            raise ConfigError(f"lora_modules: {module.name}={module.path}: {error}") from error


def num_threads_for(models: Iterable[ModelConfig]) -> int:
    """The number of this machine's cores for each rank of all groups of ``models``, at least 1."""
    num_ranks = sum(each.max_groups * each.engine.tensor_parallel_size for each in models)
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def is_on_gpu(config: GroupModel, resources: Mapping[str, float]) -> bool:
    """Whether the model's groups run on GPUs, given Ray's ``resources``."""
    device = config.engine.device
    return device == "cuda" or (device == "auto" and resources.get("GPU", 0) > 0)


def _logging(config: LogSettings) -> dict[str, Any]:
    """Serve's logging configuration: of its own lines, and the format of a replica's file."""
    encoding = "JSON" if config.log_format == "json" else "TEXT"
    return {"log_level": "WARNING", "enable_access_log": False, "encoding": encoding}


def _one_of(resource: str | None) -> dict[str, float]:
    return {resource: 1} if resource else {}
