"""Gateways that route as if there were no step clock, to compare: see docs/decisions/0024.

    cost = queued + (1.25 + behind) * missing + 24 * requests

What a group has to do is what its last frame said, however long ago that was.
"""

from dataclasses import dataclass
from typing import Any, Generic

from quire.cluster.config import ClusterConfig
from quire.cluster.deployments import Gateway
from quire.cluster.gateway.server import new_table
from quire.router.policies.prefix_aware import Load, N, PrefixAware
from quire.router.table import RoutingTable


class Unclocked(PrefixAware):
    """Sees all requests as if they had just been sent, so that no step is under way."""

    reads_steps = False

    def _work(self, load: Load[N], now_s: float) -> tuple[N, N]:
        return super()._work(_NoStep(load), now_s)


@dataclass(slots=True)
class _NoStep(Generic[N]):
    load: Load[N]

    @property
    def num_running(self) -> N:
        return 0 * self.load.num_running

    @property
    def num_waiting(self) -> N:
        return 0 * self.load.num_waiting

    @property
    def num_pending_prefill_tokens(self) -> N:
        return self.load.num_pending_prefill_tokens

    @property
    def num_reserved_requests(self) -> N:
        load = self.load
        return load.num_running + load.num_waiting + load.num_reserved_requests

    @property
    def num_reserved_tokens(self) -> N:
        return self.load.num_reserved_tokens

    @property
    def num_step_tokens(self) -> N:
        return 0 * self.load.num_step_tokens

    def step_over(self, now_s: float) -> N:
        return 0 * self.load.num_running


class UnclockedTable(RoutingTable):
    def __init__(self, **options: Any) -> None:
        super().__init__(policy=Unclocked(), **options)


def unclocked_gateway() -> type[Gateway]:
    """A gateway class for `quire.cluster.app.running_app`."""

    class UnclockedGateway(Gateway):
        def make_table(self, config: ClusterConfig) -> RoutingTable:
            return new_table(config, UnclockedTable)

    return UnclockedGateway
