"""The application under test: Quire's, with groups that can be identified and crashed.

A group writes a file about itself, so that its processes can be found. A request whose prompt
begins with `POISON` kills it, like one that hits a fault in a kernel. Everything else is as in
`quire.cluster.deploy.deployments`, except that gateways may lose some of the groups' cache events.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from bench.serving.lossy import Loss, lossy_gateway
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from quire.cluster.config import GroupConfig
from quire.cluster.deploy import deployments
from quire.cluster.deploy.build import build_gateways, build_groups
from quire.cluster.deploy.listed import listed_in
from quire.cluster.deploy.local import ray_session
from quire.cluster.deploy.names import application_of, part_of
from quire.cluster.settings import config_from
from quire.worker.group_engine import GroupEngine
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.request.request import Prepared

APP_NAME = "quire"
"""Its processes' titles have it."""
LIVES = "QUIRE_CHAOS_LIVES"
"""The environment variable with the folder for what groups write."""
POISON = (4001, 4002, 4003)
_POLL_S = 0.1


class ReplicaGroup(deployments.ReplicaGroup):
    # The name is that of the deployment, and must be that of Quire's.
    async def __init__(self, config: GroupConfig) -> None:  # type: ignore[misc]
        await super().__init__(config)
        engine = self._server._engine
        _make_mortal(engine)
        executor = engine._executor
        life = {
            "group": self._group_id,
            "pid": os.getpid(),
            "ranks": executor.pids if isinstance(executor, LockstepExecutor) else [],
            "address": ray.util.get_node_ip_address(),
        }
        path = Path(os.environ[LIVES]) / f"{self._group_id}.json"
        path.with_suffix(".new").write_text(json.dumps(life))
        path.with_suffix(".new").rename(path)  # Nobody reads half a file.


def _make_mortal(engine: GroupEngine) -> None:
    add_request = engine.add_request

    def add_or_die(request: Prepared) -> None:
        if tuple(request.prompt_token_ids[: len(POISON)]) == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        add_request(request)

    engine.add_request = add_or_die  # type: ignore[method-assign]


def application(args: dict[str, Any]) -> "serve.Application":
    """The gateways: ``settings`` as `quire.cluster.deploy.app.application` takes them, and what
    gateways are not told, ``loss``."""
    gateway = None
    if args["loss"]:
        gateway = lossy_gateway(Loss(**args["loss"]))
        gateway.__name__ = deployments.Gateway.__name__
    config = config_from(args["settings"])
    return build_gateways(config, listed_in(config), gateway=gateway)


def groups(args: dict[str, Any]) -> "serve.Application":
    """The groups of the same."""
    config = config_from(args["settings"])
    return build_groups(config, part_of(config.model_name), group=ReplicaGroup)


def deploy(address: str, args: Mapping[str, Any], num_groups: int) -> None:
    """Starts both on the Ray cluster at ``address``, or upgrades what is there; as KubeRay does,
    from a configuration. If only ``num_groups`` is new, all else is left alone.

    Raises:
        RuntimeError: Serve gave up.
    """
    groups_name = application_of(APP_NAME, part_of(config_from(args["settings"]).model_name))
    deployment = DeploymentSchema(name=ReplicaGroup.__name__, num_replicas=num_groups)
    schemas = [
        ServeApplicationSchema(
            name=name,
            route_prefix=None,
            import_path=f"{__name__}:{builder.__name__}",
            args=dict(args),
            deployments=changed,
        )
        for name, builder, changed in (
            (APP_NAME, application, []),
            (groups_name, groups, [deployment]),
        )
    ]
    with ray_session(address=address):
        serve.start(proxy_location="Disabled")
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema(applications=schemas))
        for name in (APP_NAME, groups_name):
            while (status := serve.status().applications[name]).status != "RUNNING":
                if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise RuntimeError(f"{status.status}: {status.message}")
                time.sleep(_POLL_S)
