"""The application under fire: Quire's, whose groups say who they are and can be poisoned.

A group writes a file about itself, so that its processes can be found; and a request whose prompt
begins with `POISON` kills it, as one would that runs into a fault of a kernel. All else is as in
`quire.cluster.deployments`; for gateways, some of what groups say of their caches may be lost.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from bench.serving.lossy import Loss, lossy_gateway
from ray import serve

from quire.cluster import deployments
from quire.cluster.app import APP_NAME, build_app
from quire.cluster.config import ClusterConfig
from quire.cluster.local import ray_session
from quire.cluster.settings import config_from
from quire.worker.engine import Engine
from quire.worker.process_executor import ProcessExecutor
from quire.worker.request import Request

LIVES = "QUIRE_CHAOS_LIVES"
"""The environment variable with the folder for what groups write."""
POISON = (4001, 4002, 4003)


class ReplicaGroup(deployments.ReplicaGroup):
    # The name is that of the deployment, and must be that of Quire's.
    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        await super().__init__(config)
        engine = self._server._engine
        _make_mortal(engine)
        executor = engine._executor
        life = {
            "group": self._group_id,
            "pid": os.getpid(),
            "ranks": executor.pids if isinstance(executor, ProcessExecutor) else [],
            "address": ray.util.get_node_ip_address(),
        }
        path = Path(os.environ[LIVES]) / f"{self._group_id}.json"
        path.with_suffix(".new").write_text(json.dumps(life))
        path.with_suffix(".new").rename(path)  # Nobody reads half a file.


def _make_mortal(engine: Engine) -> None:
    add_request = engine.add_request

    def add_or_die(request: Request) -> None:
        if tuple(request.prompt_token_ids[: len(POISON)]) == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        add_request(request)

    engine.add_request = add_or_die  # type: ignore[method-assign]


def deploy(address: str, settings: Mapping[str, Any], loss: Mapping[str, float]) -> None:
    """Starts the application on the Ray cluster at ``address``, or upgrades the one there."""
    config = config_from(settings)
    gateway = None
    if loss:
        gateway = lossy_gateway(Loss(**loss))  # type: ignore[arg-type]
        gateway.__name__ = deployments.Gateway.__name__
    with ray_session(address=address):
        serve.start(proxy_location="Disabled")
        app = build_app(config, gateway=gateway, group=ReplicaGroup)
        handle = serve.run(app, name=APP_NAME, route_prefix=None)
        handle.wait_for_groups.remote(config.num_groups).result()
