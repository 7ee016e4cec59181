"""The same groups behind Ray Serve alone: its handles, its default router, its streams.

No gateway, no directory: a call goes to the shorter of two random queues, as Serve asks replicas
for them, and tokens travel through Ray. What that costs per token is part of what is measured.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, cast

from bench.serving.load import Stream, Target

from quire.cluster.config import ClusterConfig
from quire.worker.api.outputs import TokenDelta
from quire.worker.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_APP = "groups-behind-serve"


class Handle:
    """Sends requests through a deployment handle."""

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self._handle = handle.options(method_name="generate", stream=True)

    async def send(self, stream: Stream) -> None:
        request = stream.request
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=not request.may_stop,
        )
        stream.sent_s = time.monotonic()
        try:
            deltas = self._handle.remote(
                list(request.token_ids), params, cache_salt=request.cache_salt
            )
            async for delta in cast("AsyncIterator[TokenDelta]", deltas):
                _take(stream, delta)
        except Exception as error:  # Whatever Ray makes of the replica's.
            stream.error = f"{type(error).__name__}: {error}"
        finally:
            stream.ended_s = time.monotonic()


@contextlib.contextmanager
def groups_behind_serve(config: ClusterConfig) -> Iterator[Target]:
    """Runs ``config``'s groups on the Ray cluster that this process is connected to."""
    from ray import serve

    from quire.cluster.deploy.deployments import ReplicaGroup

    groups = serve.deployment(
        num_replicas=config.num_groups,
        ray_actor_options={"num_cpus": 0},
        # The engine queues and batches; Serve's own bound of 5 would keep requests from it.
        max_ongoing_requests=config.engine.max_num_waiting,
        graceful_shutdown_timeout_s=config.drain_timeout_s + 10,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )(ReplicaGroup)
    serve.start(proxy_location="Disabled")
    try:
        yield Handle(serve.run(groups.bind(config), name=_APP, route_prefix=None))
    finally:
        serve.delete(_APP)


def _take(stream: Stream, delta: TokenDelta) -> None:
    now_s = time.monotonic()
    if not stream.tokens:
        stream.num_cached_tokens = delta.num_cached_tokens
    if delta.token_offset != len(stream.tokens):
        stream.error = f"token {delta.token_offset} came, expected {len(stream.tokens)}"
        return
    stream.tokens.extend(delta.token_ids)
    stream.times.extend([now_s] * len(delta.token_ids))
    stream.finish = delta.finish_reason or ""
