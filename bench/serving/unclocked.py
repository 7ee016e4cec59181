"""Gateways that route as if there were no step clock, to compare: see docs/decisions/0024.

    cost = queued + (1.25 + behind) * missing + 32 * requests

What a group has to do is what its last frame said, however long ago that was.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deployments import Gateway
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.policy import GroupState, RouteRequest
from quire.router.table import RoutingTable


class Unclocked(PrefixAware):
    """Sees all requests as if they had just been sent, so that no step is under way."""

    reads_steps = False

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        return super().costs(
            request,
            [
                replace(
                    state,
                    num_running=0,
                    num_waiting=0,
                    num_reserved_requests=state.num_requests,
                    step_s=0.0,
                )
                for state in groups
            ],
            hits,
        )


class UnclockedTable(RoutingTable):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._policy = Unclocked()


def unclocked_gateway() -> type[Gateway]:
    """A gateway class for `quire.cluster.app.running_app`."""

    class UnclockedGateway(Gateway):
        def make_table(self, config: ClusterConfig) -> RoutingTable:
            return UnclockedTable(block_size=config.engine.block_size, config=config.routing)

    return UnclockedGateway
