"""Waits until an application serves, and reports what delays it.

Ray Serve waits without limit, for a GPU that no node has or for groups that no gateway can reach.
This module tells the user why.
"""

import itertools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.names import application_of, deployments_of, parts_among
from quire.cluster.deploy.progress import Progress
from quire.cluster.deploy.start_steps import Steps, forgotten_at_end, steps_of
from quire.cluster.errors import StartFailed
from quire.worker.request.errors import ConfigError, QuireError

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray import serve
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

    from quire.cluster.deploy.deployments import Gateway

_LOOK_EVERY_S = 0.1
_STEPS_EVERY_S = 0.5
_STARTING = "groups and gateways start"
_LABELS = {"ReplicaGroup": "groups", "Gateway": "gateways"}
_OTHERS_S = 30.0
"""How long other models may still start after the first one serves, before the cluster counts as
started."""
_GROUPS_TOLD_AFTER_S = 10.0
_MAX_SHOWN_CHARS = 600
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Serve's message is not shown: the steps of a start are reported anyway, and Serve says this at
# once of a replica that gets new settings.
_SLOW = re.compile(r"replicas that have taken more than \d+s to initialize")
_AGAIN = "failed as it started, and is started again"
_OUR_ERRORS = "quire.worker.request.errors."
# Errors that a second attempt would raise again.
_HOPELESS = (f"{_OUR_ERRORS}ConfigError: ", f"{_OUR_ERRORS}CheckpointError: ")


def start_serve() -> None:
    """Starts Serve's controller on the Ray cluster, or connects to the running one."""
    from ray import serve

    try:
        serve.start(proxy_location="Disabled")
    except ValueError:  # Another process has started it meanwhile.
        serve.start(proxy_location="Disabled")


@dataclass(frozen=True)
class Started:
    """A cluster's gateways, which serve, and the parts whose groups do not yet."""

    gateways: "DeploymentHandle[Gateway]"
    late: tuple[str, ...]


def start_apps(
    name: str,
    gateways: "serve.Application",
    parts: "Mapping[str, serve.Application]",
    *,
    models: Mapping[str, str],
    on_failed: Callable[[str, QuireError], None],
    progress: Progress,
) -> Started:
    """Starts the gateways of the cluster ``name`` and the groups in ``parts``. Returns once
    gateways can route to the groups of at least one part, and the others serve, have failed or are
    `_OTHERS_S` late. ``models`` are the parts by model. ``on_failed`` is called for a part that
    fails while others may serve; ``progress`` shows the state.

    Raises:
        ConfigError: The gateways, or the groups of every part, cannot start with these settings.
        StartFailed: The gateways, or the groups of every part, failed as they started. The error's
            notes have the tracebacks.
    """
    start = _Start(name, progress)
    apps = {application_of(name, part): app for part, app in parts.items()}
    with forgotten_at_end(name):
        handle = _run({name: gateways, **apps})[0]
        failed: dict[str, QuireError] = {}
        served_s: float | None = None
        while True:
            found = _applications()
            start.look(deployments_of(name, found))
            if error := _given_up(found[name]):
                raise error
            for part in parts.keys() - failed.keys():
                if error := _given_up(found[application_of(name, part)]):
                    failed[part] = error
                    if len(failed) < len(parts):
                        on_failed(part, error)
            if failed and len(failed) == len(parts):
                raise next(iter(failed.values()))
            left = parts.keys() - failed.keys()
            ready = {each for each in left if found[application_of(name, each)].status == "RUNNING"}
            if found[name].status == "RUNNING" and ready:
                served_s = served_s or time.monotonic()
                if ready == left or time.monotonic() - served_s > _OTHERS_S:
                    break
            time.sleep(_LOOK_EVERY_S)
        progress.pending("routes", "gateways connect to groups")
        names = [model for model, part in models.items() if part in ready]
        while troubles := handle.wait_for_groups.remote(names, _GROUPS_TOLD_AFTER_S).result():
            start.tell("; ".join(troubles))
        for each in handle.models.remote().result():
            if each.name in names and each.state == "failed":  # The gateway's node cannot read it.
                on_failed(models[each.name], StartFailed(each.reason))
    return Started(gateways=handle, late=tuple(sorted(left - ready)))


def start_part(name: str, part: str, app: "serve.Application", *, progress: Progress) -> None:
    """Starts ``app``, the groups of a model; returns once all of them serve. Raises as
    `start_apps`."""
    start = _Start(name, progress)
    with forgotten_at_end(f"{name}:{part}"):
        _run({application_of(name, part): app})
        while (status := _applications()[application_of(name, part)]).status != "RUNNING":
            if error := _given_up(status):
                raise error
            start.look(dict(status.deployments))
            time.sleep(_LOOK_EVERY_S)
        start.look(dict(status.deployments))


def start_gateways(name: str, gateways: "serve.Application") -> "DeploymentHandle[Gateway]":
    """Updates the running gateways to ``gateways``; returns once they serve. Raises as
    `start_apps`."""
    (handle,) = _run({name: gateways})
    while (status := _applications()[name]).status != "RUNNING":
        if error := _given_up(status):
            raise error
        time.sleep(_LOOK_EVERY_S)
    return handle


def given_up(name: str) -> dict[str, str]:
    """The parts of the cluster ``name`` whose groups Serve has given up starting, and why."""
    found = _applications()
    errors = {
        part: _given_up(found[application_of(name, part)]) for part in parts_among(name, found)
    }
    return {part: str(error) for part, error in errors.items() if error}


def _run(apps: "Mapping[str, serve.Application]") -> "list[DeploymentHandle[Any]]":
    from ray import serve

    targets = [
        serve.RunTarget(target=app, name=name, route_prefix=None) for name, app in apps.items()
    ]
    return list(serve.run_many(targets, wait_for_applications_running=False))


def _applications() -> "dict[str, ApplicationStatusOverview]":
    from ray import serve

    return serve.status().applications


def _given_up(app: "ApplicationStatusOverview") -> QuireError | None:
    """The error of an application that will not start; ``None`` if it may."""
    if is_hopeless(app.deployments):
        return ConfigError(obstacles(app.deployments))
    if app.status == "DEPLOY_FAILED":
        return failure(app.deployments, otherwise=app.message)
    return None


class _Start:
    """What a start has seen and reported so far."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self._begin_s = time.monotonic()
        self._told = ""
        self._ready: set[str] = set()
        self._steps: dict[str, Steps] = {}
        self._looked_s = 0.0
        progress.pending(_STARTING)

    def look(self, deployments: "Mapping[str, DeploymentStatusOverview]") -> None:
        if time.monotonic() - self._looked_s >= _STEPS_EVERY_S:
            self._looked_s = time.monotonic()
            now_s, steps = time.time(), steps_of(self._name)
            self._steps |= {id_: [*known, ("", now_s)] for id_, known in steps.items()}
            under_way = sorted({known[-1][0] for known in steps.values() if known})
            waits = [
                f"{num_running(each)} of {sum(each.replica_states.values())} {label_of(name)}"
                for name, each in deployments.items()
                if each.status != "HEALTHY" and each.replica_states
            ]
            detail = ", ".join(waits) + (f"; {', '.join(under_way)}" if under_way else "")
            self._progress.pending(_STARTING, detail)
        for name, each in deployments.items():
            if each.status == "HEALTHY" and name not in self._ready:
                self._ready.add(name)
                detail = f"{num_running(each)} ready"
                if name.startswith("ReplicaGroup") and self._steps:
                    detail += f": {self._durations()}"
                self._progress.done(label_of(name), time.monotonic() - self._begin_s, detail)
        self.tell(obstacles(deployments, is_over=False))

    def tell(self, reasons: str) -> None:
        if reasons and reasons != self._told:
            self._told = reasons
            self._progress.say(f"  waiting: {reasons}")

    def _durations(self) -> str:
        """The duration of each step of the group that was seen last."""
        last = max(self._steps.values(), key=lambda steps: steps[-1][1])
        return ", ".join(
            f"{name} {max(0.0, end_s - begin_s):.1f} s"
            for (name, begin_s), (_, end_s) in itertools.pairwise(last)
        )


def label_of(deployment: str) -> str:
    """A deployment's name in words."""
    kind, _, model = deployment.partition("-")
    return _LABELS.get(kind, kind) + (f" of {model.replace('--', '/')}" if model else "")


def num_running(deployment: "DeploymentStatusOverview") -> int:
    return sum(n for state, n in deployment.replica_states.items() if state == "RUNNING")


def failure(
    deployments: "Mapping[str, DeploymentStatusOverview]", *, otherwise: str
) -> StartFailed:
    """The error for a start that Serve has given up, with the tracebacks in its notes. Its message
    is ``otherwise`` if the deployments have none."""
    error = StartFailed(obstacles(deployments) or otherwise)
    for name, message in _messages(deployments).items():
        if _raised(message):
            error.add_note(f"{name}: {_COLOURS.sub('', message).strip()}")
    return error


def obstacles(
    deployments: "Mapping[str, DeploymentStatusOverview]", *, is_over: bool = True
) -> str:
    """Why deployments do not run yet, as far as Serve knows. Unless the start ``is_over``, a failed
    attempt is reported without its reason, because Serve makes another; the reason of the last
    attempt is reported at the end, and so is a hopeless one."""
    return "; ".join(
        f"{name}: {_in_short(message) if is_over or not _raised(message) else _AGAIN}"
        for name, message in _messages(deployments).items()
        if is_over or not _raised(message).startswith(_HOPELESS)
    )


def is_hopeless(deployments: "Mapping[str, DeploymentStatusOverview]") -> bool:
    """Whether a deployment cannot start with its settings, however often Serve tries."""
    return any(_raised(each).startswith(_HOPELESS) for each in _messages(deployments).values())


def check_nodes(config: ClusterConfig) -> None:
    """Raises ConfigError: groups span several nodes, and the cluster has only this machine."""
    if (num_nodes := max(each.nodes_per_group for each in config.models.values())) > 1:
        raise ConfigError(
            f"nodes_per_group={num_nodes}: a cluster of this machine's own has one "
            "node; name one with more by ray_address"
        )


def check_room(
    config: ClusterConfig, *, on_gpu: bool, machine: Mapping[str, float]
) -> dict[str, float]:
    """Checks that a cluster of one node has room for a model's groups; without room, their start
    would wait without limit. Returns the rest of ``machine`` that the groups leave.

    Raises:
        ConfigError: ``machine``, the resources of the only node, are less than the groups reserve.
    """
    if on_gpu and not machine.get("GPU"):
        raise ConfigError(
            "device='cuda': this machine has no GPU that Ray finds; leave it out, or set "
            "device='cpu'"
        )
    wanted = {
        "GPU": config.min_groups * config.engine.tensor_parallel_size if on_gpu else 0,
        "CPU": config.min_groups * config.cpus_per_group,
    }
    for name, amount in wanted.items():
        has = machine.get(name, 0)
        if amount > has:
            raise ConfigError(
                f"num_groups={config.min_groups} with tensor_parallel_size="
                f"{config.engine.tensor_parallel_size}: the groups reserve {amount:g} "
                f"{name}{'' if amount == 1 else 's'}, "
                f"and this machine has {has:g}; lower one of them, or "
                + ("set device='cpu'" if name == "GPU" else "cpus_per_group")
            )
    return {name: has - wanted.get(name, 0) for name, has in machine.items()}


def _messages(deployments: "Mapping[str, DeploymentStatusOverview]") -> dict[str, str]:
    return {
        name: deployment.message
        for name, deployment in deployments.items()
        if deployment.message
        and deployment.status != "HEALTHY"
        and not _SLOW.search(deployment.message)
    }


def _raised(message: str) -> str:
    """The last line of the traceback in ``message``; empty if there is none."""
    if "Traceback" in message or "ray::" in message:
        return message.strip().splitlines()[-1]
    return ""


def _in_short(message: str) -> str:
    """The message in one line; for a traceback, only the exception."""
    if raised := _raised(message):
        return raised.removeprefix(_OUR_ERRORS)
    text = " ".join(message.split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
