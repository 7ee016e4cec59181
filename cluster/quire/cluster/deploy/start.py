"""Waits until an application serves, and reports what delays it.

Ray Serve waits without end: for a GPU that no node has, or for groups that no gateway can reach.
The user should read why.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from quire.cluster.config import ClusterConfig
from quire.cluster.errors import StartFailed
from quire.worker.api.errors import ConfigError

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray import serve
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import DeploymentStatusOverview

    from quire.cluster.deploy.deployments import Gateway

Say = Callable[[str], object]

_LOOK_EVERY_S = 0.1
_GROUPS_TOLD_AFTER_S = 10.0
_MAX_SHOWN_CHARS = 600
_AGAIN = "failed as it started, and is started again"
_OUR_ERRORS = "quire.worker.api.errors."
# Which a second attempt would raise again.
_HOPELESS = (f"{_OUR_ERRORS}ConfigError: ", f"{_OUR_ERRORS}CheckpointError: ")


def start_serve() -> None:
    """Starts Serve's controller on the Ray cluster, or finds the one that it has."""
    from ray import serve

    try:
        serve.start(proxy_location="Disabled")
    except ValueError:  # Another process has started it since this one looked.
        serve.start(proxy_location="Disabled")


def start_app(
    app: "serve.Application", *, name: str, num_groups: int, say: Say
) -> "DeploymentHandle[Gateway]":
    """Runs ``app`` until it can route to ``num_groups`` groups; ``say`` hears what it waits for.

    Raises:
        ConfigError: A group or gateway cannot start with these settings.
        StartFailed: One failed as it started.
    """
    from ray import serve

    target = serve.RunTarget(target=app, name=name, route_prefix=None)
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    told = ""

    def tell(reasons: str) -> None:
        nonlocal told
        if reasons and reasons != told:
            told = reasons
            say(f"  waiting: {reasons}")

    while (status := serve.status().applications[name]).status != "RUNNING":
        if is_hopeless(status.deployments):
            raise ConfigError(obstacles(status.deployments))
        if status.status == "DEPLOY_FAILED":
            raise StartFailed(obstacles(status.deployments) or status.message)
        tell(obstacles(status.deployments, is_over=False))
        time.sleep(_LOOK_EVERY_S)
    while troubles := handle.wait_for_groups.remote(num_groups, _GROUPS_TOLD_AFTER_S).result():
        tell("; ".join(troubles))
    return handle


def obstacles(
    deployments: "Mapping[str, DeploymentStatusOverview]", *, is_over: bool = True
) -> str:
    """Why deployments do not run yet, as far as Serve has noticed. Unless the start ``is_over``,
    an attempt that failed is told without its reason: Serve makes another, and the last one's will
    be told."""
    return "; ".join(
        f"{name}: {_in_short(message) if is_over or not _raised(message) else _AGAIN}"
        for name, message in _messages(deployments).items()
    )


def is_hopeless(deployments: "Mapping[str, DeploymentStatusOverview]") -> bool:
    """Whether one of them cannot start with its settings, however often Serve tries."""
    return any(_raised(each).startswith(_HOPELESS) for each in _messages(deployments).values())


def check_nodes(config: ClusterConfig) -> None:
    """For a cluster of one node. Raises ConfigError: groups need more of them."""
    if config.nodes_per_group > 1:
        raise ConfigError(
            f"nodes_per_group={config.nodes_per_group}: a cluster of this machine's own has one "
            "node; name one with more by ray_address"
        )


def check_room(config: ClusterConfig, *, on_gpu: bool, machine: Mapping[str, float]) -> None:
    """For a cluster that will not grow: what no room is for would be waited for without end.

    Raises:
        ConfigError: ``machine``, the resources of the only node, are less than the groups reserve.
    """
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


def _messages(deployments: "Mapping[str, DeploymentStatusOverview]") -> dict[str, str]:
    return {
        name: deployment.message
        for name, deployment in deployments.items()
        if deployment.message and deployment.status != "HEALTHY"
    }


def _raised(message: str) -> str:
    """The last line of the traceback in ``message``; empty where there is none."""
    if "Traceback" in message or "ray::" in message:
        return message.strip().splitlines()[-1]
    return ""


def _in_short(message: str) -> str:
    """In one line; of a traceback, what was raised."""
    if raised := _raised(message):
        return raised.removeprefix(_OUR_ERRORS)
    text = " ".join(message.split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
