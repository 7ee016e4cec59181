"""The two deployments of a Quire application, as Ray Serve runs them.

Serve starts, replaces and counts them and tells each gateway which groups run. What clients send
and what groups answer does not pass through it: both have servers of their own.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from math import inf
from typing import cast

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from quire.cluster.autoscaling.demand import Demand
from quire.cluster.autoscaling.serve import DEMAND_PREFIX
from quire.cluster.autoscaling.worth import GroupWorth
from quire.cluster.config import ClusterConfig
from quire.cluster.gateway.server import GatewayServer, new_table
from quire.cluster.group.server import GroupServer
from quire.cluster.logs import log_beside_serve
from quire.cluster.serve_port import keep_to_node_address
from quire.router.registry import REGISTRY, Member
from quire.router.table import RoutingTable
from quire.worker.hashing import as_token_ids
from quire.worker.request import Request, TokenDelta
from quire.worker.sampling_params import SamplingParams

POOL = "replica_groups"
"""Under which the request router publishes the groups to the gateways of its process."""


_log = logging.getLogger(__name__)

_DEMAND_REPORT_S = 0.5
_DEMAND_KEPT_S = 2.0


class ReplicaGroup:
    """A Serve replica that is one replica group."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        self._at_end = contextlib.AsyncExitStack()  # First: `__del__` follows a failed start too.
        log_beside_serve()
        keep_to_node_address()
        if config.group_host == "auto":
            config = replace(config, group_host=ray.util.get_node_ip_address())
        self._config = config
        self._demand: dict[str, tuple[float, int]] = {}  # By gateway, with when it was said.
        self._worth = GroupWorth()
        self._group_id = serve.get_replica_context().replica_id.unique_id
        self._server = await GroupServer.start(config, group_id=self._group_id)
        self._at_end.push_async_callback(self._server.stop, drain_timeout_s=config.drain_timeout_s)

    def record_replica_metadata(self) -> dict[str, str]:
        """Reaches every gateway through Serve's membership."""
        return {"address": self._server.address}

    def check_health(self) -> None:
        """Serve replaces the group when this raises."""
        self._server.check()

    async def note_demand(self, gateway: str, num_tokens: int) -> None:
        """Hears from a gateway how many prompt tokens wait there for any group.

        Where no group runs, the call waits with Serve, and is what has one started.
        """
        self._demand[gateway] = time.monotonic(), num_tokens

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller hears once a second, for `quire.cluster.autoscaling.serve`."""
        stats = self._server.stats
        now_s = time.monotonic()
        self._demand = {
            gateway: (time_s, num_tokens)
            for gateway, (time_s, num_tokens) in self._demand.items()
            if now_s - time_s < _DEMAND_KEPT_S
        }
        demand = {
            f"{DEMAND_PREFIX}{name}": float(tokens) for name, (_, tokens) in self._demand.items()
        }
        return {
            "num_pending_prefill_tokens": stats.num_pending_prefill_tokens,
            "num_prefilled_tokens": stats.num_prefilled_tokens,
            "num_full_step_tokens": stats.num_full_step_tokens,
            "full_step_s": stats.full_step_s,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "max_num_seqs": self._config.engine.max_num_seqs,
            "kv_use": stats.num_held_blocks / stats.num_total_blocks,
            "worth": self._worth.observe(
                num_hit_tokens=stats.num_hit_tokens,
                num_held_tokens=stats.num_held_slots - stats.num_wasted_slots,
                now_s=now_s,
            ),
            **demand,
        }

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
        await self._at_end.aclose()


class Gateway:
    """A Serve replica that is one gateway."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, config: ClusterConfig, groups: DeploymentHandle[ReplicaGroup]
    ) -> None:
        self._at_end = contextlib.AsyncExitStack()
        log_beside_serve()
        keep_to_node_address()
        self._server = await GatewayServer.start(config, table=self.make_table(config))
        # Deriving a handle makes its request router, which publishes the groups as they come
        # and go. Serve refers to routers weakly: the handle has to be kept.
        self._handle = groups.options()
        self._at_end.callback(REGISTRY.subscribe(POOL, self._take_members))
        self._at_end.callback(
            REGISTRY.attach(POOL, self._server.table, hash_prompt=self._server.gateway.hash_prompt)
        )
        if config.autoscaling:
            self._at_end.callback(asyncio.create_task(self._report_demand()).cancel)
        # The last that is put here ends first: streams that are still there when a gateway stops
        # may need a group that is started only then.
        self._at_end.push_async_callback(self._server.stop, drain_timeout_s=config.drain_timeout_s)

    def make_table(self, config: ClusterConfig) -> RoutingTable:
        """What this gateway routes by; a seam for those that measure routing in trouble."""
        return new_table(config)

    def _take_members(self, members: Sequence[Member]) -> None:
        # Serve passes on what a replica said of itself, and nothing for one that could not say.
        said = [(member.metadata or {}).get("address") for member in members]
        self._server.groups.set_addresses(str(address) for address in said if address)

    async def _report_demand(self) -> None:
        """Says what waits here for a group, as long as anything does."""
        demand = self._server.groups.demand
        note = self._handle.options(method_name="note_demand")
        name = serve.get_replica_context().replica_id.unique_id
        was_told = True
        while True:
            await demand.wait_for_some()
            try:
                await _tell(note, name, demand)
                was_told = True
            # Of many kinds, some of them while Serve replaces groups: the next try may do.
            except Exception as error:
                if was_told:
                    _log.warning("demand cannot be told: %r", error)
                was_told = False
            await asyncio.sleep(_DEMAND_REPORT_S)

    async def addresses(self) -> tuple[str, str]:
        """``host:port`` of the gRPC server and of the HTTP server."""
        return self._server.grpc_address, self._server.http_address

    async def wait_for_groups(self, num_groups: int, timeout_s: float = inf) -> list[str]:
        """Returns nothing once so many groups can be routed to; if they still cannot be after
        ``timeout_s``, why."""
        groups = self._server.groups
        end_s = time.monotonic() + timeout_s
        while groups.num_ready < num_groups:
            if time.monotonic() > end_s:
                return groups.troubles() or [f"{groups.num_ready} of {num_groups} groups are known"]
            await groups.wait_for_change(timeout_s=1)
        return []

    async def __del__(self) -> None:
        await self._at_end.aclose()


async def _tell(note: DeploymentHandle[ReplicaGroup], gateway: str, demand: Demand) -> None:
    call = cast("DeploymentResponse[None]", note.remote(gateway, demand.num_tokens))
    answer = asyncio.ensure_future(_answer(call))
    try:
        # The call may wait for a group; nobody needs one any more when all clients are gone.
        await demand.wait_while_some(until=answer)
    finally:
        if not answer.done():
            # It raises what went wrong with the call, which the answer says as well.
            with contextlib.suppress(Exception):
                call.cancel()
    await asyncio.wait([answer])


async def _answer(call: DeploymentResponse[None]) -> None:
    try:
        await call
    except Exception as error:  # Ray's own, of many kinds: a group died, or the call was cancelled.
        _log.debug("demand was not heard: %r", error)
