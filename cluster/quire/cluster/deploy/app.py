"""A Quire application on Ray Serve: put together, started, waited for, stopped."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app_watch import AppWatch
from quire.cluster.deploy.local import check_ports, is_only_node, ray_session
from quire.cluster.deploy.names import check_free, check_known, name_of_application
from quire.cluster.deploy.progress import Progress
from quire.cluster.deploy.serve_options import (
    gateway_version,
    group_count,
    group_version,
    name_of_groups,
    with_version,
)
from quire.cluster.deploy.session import UNKNOWN, RaySession
from quire.cluster.deploy.start import check_nodes, check_room, start_app, start_serve
from quire.cluster.deploy.stop import STOP_MARGIN_S, stop_app
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.edge.limits import GRPC_LEAVE_S
from quire.cluster.errors import ClusterLost
from quire.cluster.group.native_code import compile_native_code
from quire.cluster.group.placement import placement_options
from quire.cluster.node_adapters import NodeAdapters
from quire.cluster.settings import config_from
from quire.cluster.tls import ServerTls
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import AdapterError, ConfigError, InvalidRequest
from quire.worker.model.checkpoint import open_checkpoint
from quire.worker.model.config import check_parallel, read_model_spec, resolve_max_model_len
from quire.worker.model.hub import fetch_checkpoint, fetch_text_files, is_hub_name, pinned
from quire.worker.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray import serve

    from quire.cluster.deploy.deployments import Gateway, ReplicaGroup

SILENT = Progress()
_WATCH_EVERY_S = 0.2
_TOLD_FROM_S = 0.5


@dataclass(frozen=True)
class Endpoints:
    """Where clients connect: ``host:port`` each."""

    app: str
    """The application's name on its Ray cluster."""
    grpc: str
    http: str
    nodes: tuple[str, ...] = ()
    """The address of each gateway's node, as of now: Serve may start one again elsewhere."""
    session: RaySession = UNKNOWN
    """Whether Ray still supervises them."""


@contextlib.contextmanager
def running_cluster(
    config: ClusterConfig,
    *,
    name: str | None = None,
    ray_address: str | None = None,
    progress: Progress = SILENT,
) -> Iterator[Endpoints]:
    """Serves a model while the block runs, on the Ray cluster at ``ray_address`` or on one of
    its own. At the end requests at hand are drained and everything started here is stopped.
    ``name`` is the application's, by default made from the model's. ``progress`` hears of
    each step of the start.

    Raises:
        ConfigError: A setting cannot work on this cluster.
        CheckpointError: The model cannot be read.
        StartFailed: A group or gateway failed as it started.
        ClusterLost: Ray died meanwhile, or did not stop the application in time.
    """
    name = name_of_application(config.model_name, name)
    progress.say(f"Starting {_in_words(config)} …")
    with progress.step("model files", has_bars=is_hub_name(config.engine.model)):
        config = _checked(config)
        if ray_address is None:
            check_nodes(config)
            check_ports(config)
            _check_files(config)
            for served, model in config.models.items():
                # Here, where the user sees how far it is; groups then find it in the cache.
                checkpoint = open_checkpoint(fetch_checkpoint(model.engine.model))
                if checkpoint.decoded:
                    progress.say(f"{served}: {checkpoint.decoded}")
    if ray_address is None:
        with progress.step("native code", told_from_s=_TOLD_FROM_S):
            compile_native_code(device=config.engine.device, is_logged=False)
    with contextlib.ExitStack() as stack:
        with progress.step("Ray"):
            ray = ray_session(address=ray_address, drain_timeout_s=config.drain_timeout_s)
            session = stack.enter_context(ray)
        if ray_address is None:
            _check_room(config)
            config = _shared_out(config)
        app = running_app(config, name=name, session=session, progress=progress)
        endpoints = replace(stack.enter_context(app), session=session)
        progress.end()
        yield endpoints


@contextlib.contextmanager
def running_app(
    config: ClusterConfig,
    *,
    name: str | None = None,
    gateway: "type[Gateway] | None" = None,
    group: "type[ReplicaGroup] | None" = None,
    session: RaySession = UNKNOWN,
    progress: Progress = SILENT,
) -> Iterator[Endpoints]:
    """The same on the Ray cluster that this process is connected to, beside what else runs there.
    ``gateway`` and ``group`` as for `build_app`; ``session`` notices when Ray dies.

    Raises:
        ConfigError: The name is in use; or a group or gateway cannot start with these settings.
        StartFailed: One failed as it started.
        ClusterLost: Ray died meanwhile, or did not stop the application in time.
    """
    name = name_of_application(config.model_name, name)
    check_free(name)
    if is_only_node():  # On others, each gateway looks for itself.
        check_ports(config)
    with progress.step("Ray Serve"):
        start_serve()
    try:
        app = build_app(config, gateway=gateway, group=group)
        handle = start_app(app, name=name, progress=progress)
        nodes = tuple(sorted(set(handle.broadcast("node").results())))
        grpc, http = handle.addresses.remote().result()
        yield Endpoints(name, grpc=grpc, http=http, nodes=nodes)
    finally:
        stop_app(name, session, drain_timeout_s=config.drain_timeout_s)


def upgrade_app(config: ClusterConfig, *, name: str, progress: Progress = SILENT) -> Endpoints:
    """Has Serve replace the groups and gateways of the application ``name``, on the Ray cluster
    that this process is connected to, by others with these settings; returns once they serve.

    Raises:
        ConfigError: There is no such application; or the settings cannot work, as `running_app`
            says. The groups and gateways that it had go on as long as no new one has started.
        CheckpointError: The model cannot be read.
        StartFailed: A group or gateway failed as it started.
    """
    check_known(name)
    config = _checked(config)
    if is_only_node():
        config = _shared_out(config)
        if config.group_host == "auto":  # As `quire serve` has it on a cluster of its own.
            config = replace(config, group_host=ClusterConfig.group_host)
    progress.say(f"Upgrading {name} to {_in_words(config)} …")
    app = build_app(config)
    handle = start_app(app, name=name, progress=progress)
    grpc, http = handle.addresses.remote().result()
    return Endpoints(name, grpc=grpc, http=http)


def serve_until_signal(
    config: ClusterConfig,
    *,
    name: str | None = None,
    ray_address: str | None = None,
    progress: Progress = SILENT,
) -> None:
    """Serves until Ctrl-C or SIGTERM, then drains and stops what it started.

    Raises:
        ClusterLost: It ended for another reason: Ray died, or the application is gone.
    """
    cluster = running_cluster(config, name=name, ray_address=ray_address, progress=progress)
    with cluster as endpoints:
        session = endpoints.session
        watching = AppWatch(endpoints.app, folder=session.logs)
        with contextlib.suppress(KeyboardInterrupt), watching as watch:
            _announce(config, endpoints, start_s=progress.elapsed_s)
            while not (what := session.lost()):
                for line in watch.news():
                    print(f"quire: {line}", file=sys.stderr, flush=True)
                if watch.is_gone:
                    raise ClusterLost(
                        f"the application {endpoints.app!r} is gone: another process stopped it"
                    )
                time.sleep(_WATCH_EVERY_S)
            print(
                f"quire: {what}: nothing is restarted or scaled any more. Streams may take "
                f"{config.drain_timeout_s:g} s to end, new requests are refused; then this ends.",
                file=sys.stderr,
                flush=True,
            )
        print("Draining …", flush=True)
    print("Stopped.")


def _announce(config: ClusterConfig, endpoints: Endpoints, *, start_s: float) -> None:
    print(
        f"Serving {', '.join(config.models)} as application {endpoints.app} after {start_s:.1f} s; "
        "Ctrl-C drains and stops."
    )
    print(f"  gRPC  {endpoints.grpc}    quire.v1.Inference, health, reflection")
    scheme = "https" if config.tls_certificate else "http"
    print(f"  HTTP  {scheme}://{endpoints.http}/v1    OpenAI API; /docs, /health, /metrics")
    session = endpoints.session
    print(f"  Ray   {_ray_address()}    for quire upgrade --ray-address")
    if session.kept_logs is not None:
        print(f"  logs  {session.kept_logs}    kept; live/ while it serves")
    elif session.logs is not None:
        print(f"  logs  {session.logs}    on each node")
        print(f"  gateways on {', '.join(endpoints.nodes)}: each answers at these ports")
    sys.stdout.flush()


def _ray_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _in_words(config: ClusterConfig) -> str:
    return "; ".join(map(_model_in_words, config.models.values()))


def _model_in_words(config: ClusterConfig) -> str:
    num_groups, num_ranks = config.min_groups, config.engine.tensor_parallel_size
    ranks = "one rank" if num_ranks == 1 else f"{num_ranks} tensor-parallel ranks"
    groups = "1 replica group" if num_groups == 1 else f"{num_groups} replica groups"
    return f"{groups} of {ranks}, model {config.model_name}"


def build_app(
    config: ClusterConfig,
    *,
    gateway: "type[Gateway] | None" = None,
    group: "type[ReplicaGroup] | None" = None,
) -> "serve.Application":
    """The application: gateways bound to a deployment of replica groups for each model.

    ``gateway`` is run in place of `deployments.Gateway`, whose subclass it is, and ``group`` in
    place of `deployments.ReplicaGroup`.
    """
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from quire.cluster.deploy import deployments
    from quire.router.serve_router import PrefixAwareRouter

    config = _with_commit(config)
    common: dict[str, Any] = {
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        # A replica that fails three times in a row will not recover by itself: report it.
        "max_constructor_retry_count": 3,
    }
    groups = [
        with_version(
            serve.deployment(
                name=name_of_groups(config, served),
                **group_count(model),
                **placement_options(model, on_gpu=_on_gpu(model, ray.cluster_resources())),
                # Of calls through handles; the engine queues and batches, and Serve's 5 would keep
                # them from it.
                max_ongoing_requests=model.engine.max_num_waiting,
                request_router_config=RequestRouterConfig(
                    request_router_class=PrefixAwareRouter,  # type: ignore[arg-type]
                    request_router_kwargs={"pool": deployments.pool_of(served)},
                ),
                graceful_shutdown_timeout_s=config.drain_timeout_s + STOP_MARGIN_S,
                # Serve rounds a percentage up: of up to a hundred replicas this is one.
                max_surge_percent=int(config.start_first),
                **common,
            )(group or deployments.ReplicaGroup),
            group_version(model),
        ).bind(model)
        for served, model in config.models.items()
    ]
    gateways = with_version(
        serve.deployment(
            num_replicas=config.num_gateways,
            ray_actor_options={"num_cpus": 0, "resources": _one_of(config.gateway_resource)},
            graceful_shutdown_timeout_s=GRPC_LEAVE_S + config.drain_timeout_s + STOP_MARGIN_S,
            # There is room for one more, unless places are counted. A single one leaves no gap.
            max_surge_percent=int(config.start_first or config.gateway_resource is None),
            **common,
        )(gateway or deployments.Gateway),
        gateway_version(config),
    )
    app: serve.Application = gateways.bind(config, *groups)
    return app


def application(settings: dict[str, Any]) -> "serve.Application":
    """The application for a Serve configuration file: ``import_path:
    quire.cluster.deploy.app:application``.

    ``settings``, the file's ``args``, are `ClusterConfig`'s fields, and under ``engine`` those of
    `EngineConfig`; without ``engine.model``, the demo model is served.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work.
        CheckpointError: The model cannot be read.
    """
    return build_app(_checked(config_from(settings)))


def _on_gpu(config: ClusterConfig, resources: Mapping[str, float]) -> bool:
    device = config.engine.device
    return device == "cuda" or (device == "auto" and resources.get("GPU", 0) > 0)


def _check_room(config: ClusterConfig) -> None:
    import ray

    resources = left = ray.cluster_resources()
    for model in config.models.values():
        left = check_room(model, on_gpu=_on_gpu(model, resources), machine=left)


def _one_of(resource: str | None) -> dict[str, float]:
    return {resource: 1} if resource else {}


def _with_commit(config: ClusterConfig) -> ClusterConfig:
    """Makes all groups serve the commit that a model of the hub is at now. Raises
    CheckpointError."""
    return _with_engines(config, lambda engine: replace(engine, model=pinned(engine.model)))


def _with_engines(
    config: ClusterConfig, change: Callable[[EngineConfig], EngineConfig]
) -> ClusterConfig:
    """The same with each model's engine changed."""
    more = tuple(replace(each, engine=change(each.engine)) for each in config.more_models)
    return replace(config, engine=change(config.engine), more_models=more)


def _checked(config: ClusterConfig) -> ClusterConfig:
    """Checks, before anything starts, the settings that would make every group fail; returns
    `_with_commit`.

    All files of a model of the hub but its weights are fetched: the weights may be needed
    elsewhere only.

    Raises:
        ConfigError: The settings cannot work for this model.
        CheckpointError: The model cannot be read.
    """
    config = _with_commit(config)
    for served in config.models.values():
        engine = served.engine
        folder = fetch_text_files(engine.model)
        model = read_model_spec(folder, model_impl=engine.model_impl)
        check_parallel(model, engine.tensor_parallel_size)
        resolve_max_model_len(engine, model)
        Tokenizer.load(folder, chat_template=served.chat_template)
        if not is_hub_name(engine.model):
            open_checkpoint(engine.model)
    _check_adapters(config)
    return config


def _check_adapters(config: ClusterConfig) -> None:
    """Raises ConfigError: an adapter cannot be read, or its model cannot run it."""
    for model in config.models.values():
        for module in model.lora_modules:
            try:
                NodeAdapters(model.engine).keep(module.path)
            except (AdapterError, InvalidRequest) as error:
                raise ConfigError(f"lora_modules: {module.name}={module.path}: {error}") from error


def _check_files(config: ClusterConfig) -> None:
    """The same for files that gateways on this machine read. Raises ConfigError."""
    if config.api_keys_file is not None:
        ApiKeys.load(config.api_keys_file)
    if config.tls_certificate is not None and config.tls_key is not None:
        ServerTls(certificate=config.tls_certificate, key=config.tls_key)


def _shared_out(config: ClusterConfig) -> ClusterConfig:
    """Shares this machine's cores among all ranks of all groups."""
    num_ranks = sum(
        each.max_groups * each.engine.tensor_parallel_size for each in config.models.values()
    )
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    return _with_engines(
        config, lambda engine: replace(engine, num_threads=engine.num_threads or num_threads)
    )
