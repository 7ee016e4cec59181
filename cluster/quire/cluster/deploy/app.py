"""Starts, upgrades, serves and stops a Quire application on Ray Serve."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app_watch import AppWatch
from quire.cluster.deploy.build import (
    build_gateways,
    build_groups,
    build_parts,
    check_here,
    checked,
    is_on_gpu,
    num_threads_for,
)
from quire.cluster.deploy.change import drop_unlisted, only_change
from quire.cluster.deploy.listed import listed_in
from quire.cluster.deploy.local import (
    check_ports,
    found_address,
    is_only_node,
    ray_session,
    resources_here,
)
from quire.cluster.deploy.names import (
    check_free,
    check_known,
    known_parts,
    name_of_application,
    part_of,
)
from quire.cluster.deploy.progress import Progress
from quire.cluster.deploy.serve_options import check_of_groups
from quire.cluster.deploy.session import UNKNOWN, RaySession
from quire.cluster.deploy.start import Started, check_nodes, check_room, start_apps, start_serve
from quire.cluster.deploy.status_line import StatusLine, look_at
from quire.cluster.deploy.stop import let_go, stop_app
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.errors import ClusterLost
from quire.cluster.group.native_code import compile_native_code
from quire.cluster.settings import config_from
from quire.cluster.tls import ServerTls
from quire.worker.model.hub import fetch_checkpoint, is_hub_name
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import QuireError
from quire.worker.weights.checkpoint import open_checkpoint

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
    """The current address of each gateway's node: Serve may restart a gateway on another node."""
    session: RaySession = UNKNOWN
    """The connection to Ray, which notices when Ray dies."""


@contextlib.contextmanager
def running_cluster(
    config: ClusterConfig,
    *,
    name: str | None = None,
    ray_address: str | None = None,
    progress: Progress = SILENT,
) -> Iterator[Endpoints]:
    """Serves the models of ``config`` while the block runs, on the Ray cluster at ``ray_address``
    (see `found_address`) or on a new one on this machine. At the end, running requests are drained
    and everything started here is stopped. ``name`` is the application's, by default made from the
    model's. ``progress`` reports each step of the start.

    Raises:
        ConfigError: A setting cannot work on this cluster.
        CheckpointError: The model cannot be read.
        StartFailed: A group or gateway failed as it started.
        ClusterLost: Ray died meanwhile, or did not stop the application in time.
    """
    name = name_of_application(config.model_name, name)
    if ray_address is not None:
        ray_address = found_address(ray_address)
    progress.say(f"Starting {_in_words(config)} …")
    with progress.step("model files", has_bars=is_hub_name(config.engine.model)):
        machine: Mapping[str, float] | None = None
        config, failed = checked(config)
        if ray_address is None:
            check_nodes(config)
            check_ports(config)
            _check_files(config)
            machine = resources_here()  # The last check, since it imports Ray.
            if machine is not None:
                check_here(config, failed, machine=machine)
                _check_room(config, machine)
            for served, model in config.models.items():
                if served in failed:
                    continue
                # Downloads here, where the user sees the progress; groups then use the cache.
                checkpoint = open_checkpoint(fetch_checkpoint(model.engine.model))
                if checkpoint.decoded:
                    progress.say(f"{served}: {checkpoint.decoded}")
    if ray_address is None:
        with progress.step("native code", told_from_s=_TOLD_FROM_S):
            compile_native_code(device=config.engine.device, is_logged=False)
    with contextlib.ExitStack() as stack:
        with progress.step("Ray"):
            connected = ray_session(address=ray_address, drain_timeout_s=config.drain_timeout_s)
            session = stack.enter_context(connected)
        if ray_address is None:
            if machine is None:
                import ray

                _check_room(config, ray.cluster_resources())
            config = _shared_out(config)
        app = running_app(config, name=name, failed=failed, session=session, progress=progress)
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
    failed: "Mapping[str, QuireError] | None" = None,
    session: RaySession = UNKNOWN,
    progress: Progress = SILENT,
) -> Iterator[Endpoints]:
    """Serves like `running_cluster`, on the Ray cluster that this process is connected to, beside
    other applications. ``gateway`` and ``group`` are as for `build_gateways` and `build_groups`;
    ``failed`` are models that cannot be served; ``session`` notices when Ray dies.

    Raises:
        ConfigError: The name is in use; or the gateways, or the groups of every model, cannot start
            with these settings.
        StartFailed: The gateways, or the groups of every model, failed as they started.
        ClusterLost: Ray died meanwhile, or did not stop the application in time.
    """
    name = name_of_application(config.model_name, name)
    check_free(name)
    if is_only_node():  # On several nodes, each gateway checks its own node.
        check_ports(config)
    with progress.step("Ray Serve"):
        start_serve()
    at_end = contextlib.ExitStack()
    try:
        started = _start(
            config, {}, failed or {}, name=name, gateway=gateway, group=group, progress=progress
        )
        handle = started.gateways
        at_end.callback(let_go, handle)
        nodes = tuple(sorted(set(handle.broadcast("node").results())))
        grpc, http = handle.addresses.remote().result()
        yield Endpoints(name, grpc=grpc, http=http, nodes=nodes)
    finally:
        at_end.close()
        stop_app(name, session, drain_timeout_s=config.drain_timeout_s)


def upgrade_app(
    config: ClusterConfig,
    *,
    name: str,
    gateway: "type[Gateway] | None" = None,
    group: "type[ReplicaGroup] | None" = None,
    progress: Progress = SILENT,
) -> Endpoints:
    """Has Serve replace the groups and gateways of the application ``name``, on the Ray cluster
    that this process is connected to, by new ones with ``config``; returns once they serve.

    Raises:
        ConfigError: There is no such application; or the settings cannot work, as in `running_app`.
            The old groups and gateways continue while no new one has started.
        CheckpointError: The model cannot be read.
        StartFailed: A group or gateway failed as it started.
    """
    from ray import serve

    check_known(name)
    config, failed = checked(config)
    if is_only_node():
        config = _shared_out(config)
        if config.group_host == "auto":  # As `quire serve` sets it on a cluster that it starts.
            config = replace(config, group_host=ClusterConfig.group_host)
    progress.say(f"Upgrading {name} to {_in_words(config)} …")
    with only_change(name):
        parts = known_parts(name, config.models, serve.status().applications)
        started = _start(
            config, parts, failed, name=name, gateway=gateway, group=group, progress=progress
        )
        handle = started.gateways
        drop_unlisted(name, listed_in(config, parts=parts), config=config)
    grpc, http = handle.addresses.remote().result()
    return Endpoints(name, grpc=grpc, http=http)


def _start(
    config: ClusterConfig,
    parts: Mapping[str, str],
    failed: "Mapping[str, QuireError]",
    *,
    name: str,
    gateway: "type[Gateway] | None" = None,
    group: "type[ReplicaGroup] | None" = None,
    progress: Progress,
) -> Started:
    """Starts or upgrades the cluster ``name``. ``parts``: models that it serves already, and their
    parts. Raises as `start_apps`."""
    for model, error in failed.items():
        warn(f"{model} cannot be served: {error}")
    troubles = {model: str(error) for model, error in failed.items()}
    models = listed_in(config, parts=parts, troubles=troubles)
    by_part = {each.part: each.name for each in models}
    started = start_apps(
        name,
        build_gateways(config, models, gateway=gateway),
        build_parts(config, models, group=group),
        models={each.name: each.part for each in models},
        on_failed=lambda part, error: warn(f"{by_part[part]} cannot be served: {error}"),
        progress=progress,
    )
    for part in started.late:
        warn(f"{by_part[part]} still starts; the others are served meanwhile")
    return started


def warn(line: str) -> None:
    print(f"quire: {line}", file=sys.stderr, flush=True)


def serve_until_signal(
    config: ClusterConfig,
    *,
    name: str | None = None,
    ray_address: str | None = None,
    status_every_s: float | None = None,
    progress: Progress = SILENT,
) -> None:
    """Serves until Ctrl-C or SIGTERM, then drains and stops what it started. ``status_every_s`` is
    as for `StatusLine`.

    Raises:
        ClusterLost: Ray died, or another process stopped the application.
    """
    cluster = running_cluster(config, name=name, ray_address=ray_address, progress=progress)
    with cluster as endpoints:
        session = endpoints.session
        watching = AppWatch(endpoints.app, folder=session.logs)
        status = StatusLine(partial(look_at, endpoints.app), every_s=status_every_s)
        with contextlib.suppress(KeyboardInterrupt), watching as watch:
            _announce(config, endpoints, start_s=progress.elapsed_s)
            with status:
                what = _watch(session, watch, status, endpoints)
            warn(
                f"{what}: nothing is restarted or scaled any more. Streams may take "
                f"{config.drain_timeout_s:g} s to end, new requests are refused; then this ends."
            )
        print(
            f"Draining, for up to {config.drain_timeout_s:g} s; Ctrl-C again does not wait …",
            flush=True,
        )
    print("Stopped.")


def _watch(session: RaySession, watch: AppWatch, status: StatusLine, endpoints: Endpoints) -> str:
    """Prints news until Ray dies; returns how it died. Raises ClusterLost: the application is
    gone."""
    while not (what := session.lost()):
        for line in watch.news():
            status.clear()
            warn(line)
        if watch.is_gone:
            raise ClusterLost(
                f"the application {endpoints.app!r} is gone: another process stopped it"
            )
        time.sleep(_WATCH_EVERY_S)
    return what


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
    print(f"  page  {scheme}://{endpoints.http}/ui    what it does, live")
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


def application(settings: dict[str, Any]) -> "serve.Application":
    """Builds the gateways for a Serve configuration file: ``import_path:
    quire.cluster.deploy.app:application``. The file names their application, NAME, and lists
    another application for each model: `groups`.

    ``settings``, the file's ``args``, are `ClusterConfig`'s fields, and under ``engine`` those of
    `EngineConfig`; without ``engine.model``, the demo model is served.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work.
        CheckpointError: No model can be read.
    """
    config, failed = checked(config_from(settings))
    troubles = {model: str(error) for model, error in failed.items()}
    return build_gateways(config, listed_in(config, troubles=troubles))


def groups(settings: dict[str, Any]) -> "serve.Application":
    """Builds the groups of a model for the same file as `application`: ``import_path:
    quire.cluster.deploy.app:groups``. The application is called NAME:MODEL, where MODEL is as
    `quire.cluster.deploy.names.part_of` writes it.

    ``settings`` are the settings of the model, and those of the cluster that groups use. Serve
    replaces the groups when any of them changes. Raises as `application`, and ConfigError for a
    setting that only gateways use.
    """
    check_of_groups(settings)
    config, _ = checked(config_from(settings))
    return build_groups(config, part_of(config.model_name))


def _check_room(config: ClusterConfig, machine: Mapping[str, float]) -> None:
    """Raises ConfigError: all groups together reserve more than ``machine``, the only node, has."""
    left = machine
    for model in config.models.values():
        left = check_room(model, on_gpu=is_on_gpu(model, machine), machine=left)


def _with_engines(
    config: ClusterConfig, change: Callable[[EngineConfig], EngineConfig]
) -> ClusterConfig:
    """``config`` with each model's engine changed by ``change``."""
    more = tuple(replace(each, engine=change(each.engine)) for each in config.more_models)
    return replace(config, engine=change(config.engine), more_models=more)


def _check_files(config: ClusterConfig) -> None:
    """Checks the files that gateways on this machine will read. Raises ConfigError."""
    if config.api_keys_file is not None:
        ApiKeys.load(config.api_keys_file)
    if config.tls_certificate is not None and config.tls_key is not None:
        ServerTls(certificate=config.tls_certificate, key=config.tls_key)


def _shared_out(config: ClusterConfig) -> ClusterConfig:
    """Shares this machine's cores among all ranks of all groups."""
    num_threads = num_threads_for(config.each_model)
    return _with_engines(
        config, lambda engine: replace(engine, num_threads=engine.num_threads or num_threads)
    )
