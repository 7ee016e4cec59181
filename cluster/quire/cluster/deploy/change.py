"""Changes the models of a running cluster: adds a model, removes it, or replaces its weights.

The groups of each model are a separate Serve application; the gateways receive the list of models
as their ``user_config``. Groups start before gateways learn of them, and stop after the last
gateway has released them. If a step fails, the steps before it are undone.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.config import ModelConfig, SharedSettings, ShutdownSettings
from quire.cluster.deploy import ray_private
from quire.cluster.deploy.build import build_gateways, build_groups, checked, num_threads_for
from quire.cluster.deploy.gateway_calls import ModelState, gateways_of
from quire.cluster.deploy.listed import Listed, from_json, listed_in
from quire.cluster.deploy.local import is_only_node
from quire.cluster.deploy.names import application_of, check_known, next_part, parts_among
from quire.cluster.deploy.progress import Progress
from quire.cluster.deploy.start import start_gateways, start_part
from quire.cluster.deploy.stop import stop_parts
from quire.cluster.errors import StartFailed
from quire.worker.request.errors import ConfigError, QuireError

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from quire.cluster.deploy.deployments import ReplicaGroup

_NAMESPACE = "quire-changes"
_ANSWER_S = 30.0
_LOOK_EVERY_S = 0.2
_SETTLE_S = 60.0
"""How long gateways may take to connect to a model's groups, which serve already, and to read its
files."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, as one of its gateways describes it."""

    name: str
    config: SharedSettings
    models: list[Listed]


def ask_gateways(name: str) -> Cluster:
    """Asks a gateway to describe the cluster ``name``. Raises ConfigError: there is no such
    cluster, or its gateways do not answer."""
    config, told = _asked(name, "settings")
    return Cluster(name, config, from_json(told))


def model_states(name: str) -> list[ModelState]:
    """All models of the cluster ``name``, as one gateway sees them. Raises as `ask_gateways`."""
    states: list[ModelState] = _asked(name, "models")
    return states


def add_model(
    name: str,
    model: ModelConfig,
    *,
    group: "type[ReplicaGroup] | None" = None,
    progress: Progress,
) -> None:
    """Adds a model to the cluster ``name``, and returns once gateways serve it.

    Raises:
        ConfigError: Another model has one of its names, or it cannot start with these settings.
        CheckpointError: The model cannot be read.
        StartFailed: The model's groups failed as they started, or gateways cannot serve it.
    """
    _check_changeable(name)
    with only_change(name):
        cluster = ask_gateways(name)
        check_names(cluster, model, loaded=_asked(name, "adapters"))
        if is_only_node() and model.engine.num_threads is None:
            all_models = [*(each.settings for each in cluster.models), model]
            threads = num_threads_for(all_models)
            model = replace(model, engine=replace(model.engine, num_threads=threads))
        (new,) = _listed(cluster, model)
        _begin(cluster, new, [*cluster.models, new], group=group, progress=progress)


def check_names(cluster: Cluster, new: ModelConfig, *, loaded: Iterable[str]) -> None:
    """Raises ConfigError if a name of the model ``new``, of an alias or of one of its adapters is
    used in ``cluster``. ``loaded``: the names of the adapters that gateways serve."""
    models = {each: of.name for of in cluster.models for each in (of.name, *of.settings.aliases)}
    configured = (module for of in cluster.models for module in of.settings.modules)
    adapters = {*loaded, *configured}
    for each in (new.model_name, *new.aliases, *new.modules):
        flag = "--lora-modules" if each in new.modules else "--served-model-name"
        if each in models:
            of = models[each]
            raise ConfigError(
                f"{each!r}: a model of {cluster.name} is called that already; give another "
                f"name in {flag}, or `quire model replace {of} PATH` or `quire model remove {of}`"
            )
        if each in adapters:
            raise ConfigError(
                f"{each!r}: a LoRA adapter of {cluster.name} is called that already; give another "
                f"name in {flag}, or `quire adapter unload {each}`"
            )


def replace_model(
    name: str,
    model: str,
    path: Path,
    *,
    group: "type[ReplicaGroup] | None" = None,
    progress: Progress,
) -> None:
    """Serves the weights at ``path`` under the name of ``model``, with its settings. New requests
    go to the new groups once these serve; running ones end on the old groups. Raises as
    `add_model`."""
    _check_changeable(name)
    with only_change(name):
        cluster = ask_gateways(name)
        old = _named(cluster, model)
        settings = replace(
            old.settings,
            engine=replace(old.settings.engine, model=path),
            served_model_name=old.name,
        )
        (new,) = _listed(cluster, settings)
        new = replace(new, part=next_part(old.part))
        models = [new if each is old else each for each in cluster.models]
        _begin(cluster, new, models, group=group, progress=progress)
        _stop(cluster, models, [old.part], progress=progress)


def remove_model(name: str, model: str, *, progress: Progress) -> None:
    """Stops serving a model after its running requests have ended. Raises ConfigError: it is the
    only model, or there is none of that name."""
    _check_changeable(name)
    with only_change(name):
        cluster = ask_gateways(name)
        old = _named(cluster, model)
        models = [each for each in cluster.models if each is not old]
        if not models:
            raise ConfigError(
                f"{model!r} is the only model of {name}: `quire stop {name}` stops all of it"
            )
        _tell(cluster, models)
        _stop(cluster, models, [old.part], progress=progress)


@contextlib.contextmanager
def only_change(name: str) -> Iterator[None]:
    """Locks the cluster ``name`` against changes by other processes while the block runs. Raises
    ConfigError: another process changes it.

    The lock is the name of a Ray actor, which is unique and free again when the process that made
    the actor is gone.
    """
    import ray

    class Change:
        pass

    kind: Any = ray.remote(num_cpus=0)(Change)
    try:
        change = kind.options(name=name, namespace=_NAMESPACE).remote()
    except ValueError as error:
        raise ConfigError(
            f"name={name!r}: another process changes its models; try again when that has ended"
        ) from error
    try:
        yield
    finally:
        ray.kill(change)


def drop_unlisted(name: str, models: Sequence[Listed], *, config: ShutdownSettings) -> None:
    """Stops the groups that are not in ``models``, the gateways' list: those of models that were
    removed or replaced, or whose start was interrupted."""
    from ray import serve

    parts = parts_among(name, serve.status().applications)
    listed = {each.part for each in models}
    unlisted = [each for each in parts if each not in listed]
    stop_parts(name, unlisted, drain_timeout_s=config.drain_timeout_s)


def _check_changeable(name: str) -> None:
    """Raises ConfigError: there is no such cluster, or a Serve configuration file lists its
    models."""
    check_known(name)
    get_client = ray_private.GET_CLIENT.get()
    if get_client is None:
        return
    details = get_client().get_serve_details()
    if details["applications"].get(name, {}).get("source") == "declarative":
        raise ConfigError(
            f"name={name!r}: it came from a Serve configuration, which lists its models: change "
            "that and deploy it again"
        )


def _listed(cluster: Cluster, model: ModelConfig) -> list[Listed]:
    """The list entry of a checked model. Raises as `checked`."""
    config, _ = checked(cluster.config.serving(model))
    return listed_in(config)


def _named(cluster: Cluster, model: str) -> Listed:
    for each in cluster.models:
        if model in (each.name, *each.settings.aliases):
            return each
    known = ", ".join(repr(each.name) for each in cluster.models)
    raise ConfigError(f"{model!r}: no model of {cluster.name} is called that; there are {known}")


def _begin(
    cluster: Cluster,
    new: Listed,
    models: Sequence[Listed],
    *,
    group: "type[ReplicaGroup] | None",
    progress: Progress,
) -> None:
    """Starts the groups of ``new`` and makes gateways serve ``models``. Undoes both if that
    fails."""
    name, config = cluster.name, cluster.config
    app = build_groups(config.serving(new.settings), new.part, group=group)
    told = False
    try:
        start_part(name, new.part, app, progress=progress)
        progress.pending("routes", "gateways connect to groups")
        told = True
        _tell(cluster, models)
        _wait_settled(name, new)
        progress.end()
    except BaseException:
        progress.say(f"Taking back what was begun of {new.name} …")
        if told:
            _tell(cluster, cluster.models)
        drop_unlisted(name, cluster.models, config=config)
        raise


def _tell(cluster: Cluster, models: Sequence[Listed]) -> None:
    start_gateways(cluster.name, build_gateways(cluster.config, models))


def _wait_settled(name: str, new: Listed) -> None:
    """Waits until every gateway serves ``new``. Raises StartFailed: one does not in time."""
    end_s = time.monotonic() + _SETTLE_S
    while True:
        call: Any = gateways_of(name).broadcast("models")
        states = [each for of in call.results(timeout_s=_ANSWER_S) for each in of]
        waits = {each.unsettled or each.reason for each in states if each.name == new.name} - {""}
        if not waits:
            return
        if time.monotonic() > end_s:
            raise StartFailed(f"gateways cannot serve {new.name}: {'; '.join(sorted(waits))}")
        time.sleep(_LOOK_EVERY_S)


def _stop(
    cluster: Cluster, models: Sequence[Listed], parts: Sequence[str], *, progress: Progress
) -> None:
    apps = ", ".join(application_of(cluster.name, part) for part in parts)
    progress.say(f"Draining {apps} …")
    drop_unlisted(cluster.name, models, config=cluster.config)


def _asked(name: str, method: str) -> Any:
    check_known(name)
    try:
        return getattr(gateways_of(name), method).remote().result(timeout_s=_ANSWER_S)
    except QuireError:
        raise
    except Exception as error:  # Ray's own, of many kinds.
        raise ConfigError(
            f"name={name!r}: its gateways do not answer ({error!r}); `quire upgrade` starts others"
        ) from error
