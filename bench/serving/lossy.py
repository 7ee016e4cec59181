"""Gateways whose cache events are corrupted on purpose: lost, duplicated, delayed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.deployments import Gateway
from quire.cluster.deploy.served_model import new_table
from quire.router.prefix_index.directory import Applied, GroupId, NeedsResync
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlockEvent, BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHashes


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """How often events are corrupted: shares from 0 to 1."""

    batches: float = 0.0
    """Share of messages that never arrive: the next one reveals the gap, and a replay fills it."""
    events: float = 0.0
    """Share of events left out of messages that look whole: only a digest can reveal it."""
    repeated: float = 0.0
    """Share of messages that arrive twice."""
    overtaken: float = 0.0
    """Share of messages that arrive after the group's next one."""
    seed: int = 0

    @property
    def is_any(self) -> bool:
        return any((self.batches, self.events, self.repeated, self.overtaken))


class LossyTable(RoutingTable):
    """A routing table that loses, repeats and reorders events as `Loss` says; not snapshots."""

    def __init__(self, *, loss: Loss, **options: Any) -> None:
        super().__init__(**options)
        self._loss = loss
        self._draw: Callable[[], float] = random.Random(loss.seed).random
        self._late: dict[GroupId, EventBatch] = {}

    def apply_events(self, group_id: GroupId, batch: EventBatch) -> Applied | NeedsResync:
        if batch.snapshot is None and batch.events:
            if self._is_hit(self._loss.batches):
                return Applied(0)
            batch = replace(batch, events=tuple(map(self._passed, batch.events)))
            if group_id not in self._late and self._is_hit(self._loss.overtaken):
                self._late[group_id] = batch
                return Applied(0)
        told = [batch, batch] if self._is_hit(self._loss.repeated) else [batch]
        if group_id in self._late:
            told.append(self._late.pop(group_id))
        answers = [super(LossyTable, self).apply_events(group_id, each) for each in told]
        # Whoever reads a group's messages one by one gets to the first that asks for more.
        return next((each for each in answers if isinstance(each, NeedsResync)), answers[0])

    def _passed(self, event: BlockEvent) -> BlockEvent:
        return BlocksStored(BlockHashes()) if self._is_hit(self._loss.events) else event

    def _is_hit(self, share: float) -> bool:
        return share > 0 and self._draw() < share


def lossy_gateway(loss: Loss) -> type[Gateway]:
    """A gateway class for `quire.cluster.deploy.app.running_app`."""

    class LossyGateway(Gateway):
        def make_table(self, config: ClusterConfig) -> RoutingTable:
            return new_table(config, partial(LossyTable, loss=loss))

    return LossyGateway
