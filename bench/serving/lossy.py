"""Gateways that are told less of the groups' caches than the groups say."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deployments import Gateway
from quire.router.directory import Applied, GroupId, NeedsResync
from quire.router.table import RoutingTable
from quire.worker.events import BlockEvent, BlocksStored, EventBatch
from quire.worker.hashing import BlockHashes


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Shares, from 0 to 1."""

    batches: float = 0.0
    """Of messages that never arrive: the next one shows the gap, and a replay mends it."""
    events: float = 0.0
    """Of events left out in messages that look whole: only a digest can show it."""
    seed: int = 0

    @property
    def is_any(self) -> bool:
        return self.batches > 0 or self.events > 0


class LossyTable(RoutingTable):
    """A routing table that some of what it is told does not reach. Snapshots do."""

    def __init__(self, *, loss: Loss, **options: Any) -> None:
        super().__init__(**options)
        self._loss = loss
        self._draw: Callable[[], float] = random.Random(loss.seed).random

    def apply_events(self, group_id: GroupId, batch: EventBatch) -> Applied | NeedsResync:
        if batch.snapshot is None and batch.events:
            if self._draw() < self._loss.batches:
                return Applied(0)
            batch = replace(batch, events=tuple(map(self._passed, batch.events)))
        return super().apply_events(group_id, batch)

    def _passed(self, event: BlockEvent) -> BlockEvent:
        return BlocksStored(BlockHashes()) if self._draw() < self._loss.events else event


def lossy_gateway(loss: Loss) -> type[Gateway]:
    """A gateway class for `quire.cluster.app.running_app`."""

    class LossyGateway(Gateway):
        def make_table(self, config: ClusterConfig) -> RoutingTable:
            return LossyTable(loss=loss, block_size=config.engine.block_size, config=config.routing)

    return LossyGateway
