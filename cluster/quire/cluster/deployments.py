"""The two deployments of a Quire application, as Ray Serve runs them.

Serve starts, replaces and counts them and tells each gateway which groups run. What clients send
and what groups answer does not pass through it: both have servers of their own.
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from quire.cluster.config import ClusterConfig
from quire.cluster.gateway_server import GatewayServer
from quire.cluster.group_server import GroupServer
from quire.cluster.serve_port import keep_to_node_address
from quire.router.registry import REGISTRY, Member
from quire.worker.hashing import as_token_ids
from quire.worker.request import Request, TokenDelta
from quire.worker.sampling_params import SamplingParams

POOL = "replica_groups"
"""Under which the request router publishes the groups to the gateways of its process."""


class ReplicaGroup:
    """A Serve replica that is one replica group."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        keep_to_node_address()
        if config.group_host == "auto":
            config = replace(config, group_host=ray.util.get_node_ip_address())
        self._config = config
        self._group_id = serve.get_replica_context().replica_id.unique_id
        self._server = await GroupServer.start(config, group_id=self._group_id)

    def record_replica_metadata(self) -> dict[str, str]:
        """Reaches every gateway through Serve's membership."""
        return {"address": self._server.address}

    def check_health(self) -> None:
        """Serve replaces the group when this raises."""
        self._server.check()

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, cache_salt: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        """For other Serve applications, through a handle with ``stream=True``.

        ``params.n`` and ``params.stop`` are the caller's matter, as they are the gateway's.
        """
        request = Request(
            request_id=f"handle/{uuid.uuid4()}",
            prompt_token_ids=as_token_ids(token_ids),
            params=params,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(self._server.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def __del__(self) -> None:
        await self._server.stop(drain_timeout_s=self._config.drain_timeout_s)


class Gateway:
    """A Serve replica that is one gateway."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, config: ClusterConfig, groups: DeploymentHandle[ReplicaGroup]
    ) -> None:
        keep_to_node_address()
        self._config = config
        self._server = await GatewayServer.start(config)
        # Deriving a handle makes its request router, which publishes the groups as they come
        # and go. Serve refers to routers weakly: the handle has to be kept.
        self._handle = groups.options()
        self._unsubscribe = REGISTRY.subscribe(POOL, self._take_members)
        self._detach = REGISTRY.attach(
            POOL, self._server.table, hash_prompt=self._server.gateway.hash_prompt
        )

    def _take_members(self, members: Sequence[Member]) -> None:
        self._server.groups.set_addresses(str(member.metadata["address"]) for member in members)

    async def addresses(self) -> tuple[str, str]:
        """``host:port`` of the gRPC server and of the HTTP server."""
        return self._server.grpc_address, self._server.http_address

    async def wait_for_groups(self, num_groups: int) -> None:
        """Returns once so many groups can be routed to."""
        groups = self._server.groups
        while groups.num_ready < num_groups:
            await groups.wait_for_change(timeout_s=1)

    async def __del__(self) -> None:
        self._unsubscribe()
        self._detach()
        await self._server.stop(drain_timeout_s=self._config.drain_timeout_s)
