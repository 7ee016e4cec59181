"""Simulated gateways: the router's own table, directory and event protocol on a virtual clock."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.router.config import RoutingConfig
from quire.router.policies.policy import GroupLoad, Policy
from quire.router.prefix_index.directory import GroupId, NeedsResync
from quire.router.table import RoutingTable
from quire.simulate.clock import Clock
from quire.simulate.group import Group
from quire.simulate.trace import Trace
from quire.worker.blocks.events import BlockEvent, EventBatch, EventLog


class Routed(NamedTuple):
    """The group that a request goes to. Groups are numbers."""

    group: int
    num_predicted_tokens: int
    """Tokens that the group is expected to find, or to fetch."""
    source: int | None
    num_source_blocks: int


class SimulatedGateway:
    """Events come ``lag_ms`` late, and lost ones are asked for again."""

    def __init__(
        self,
        *,
        trace: Trace,
        clock: Clock,
        logs: Sequence[EventLog],
        policy: Policy,
        lag_ms: float,
        loss: float,
        seed: int,
        first_ordinal: int = 0,
        lends: bool = False,
    ) -> None:
        """``lends``: groups lend blocks to each other."""
        self._trace = trace
        self._clock = clock
        self._lag_ms = lag_ms
        self._loss = loss
        self._rng = random.Random(seed)
        self._logs = logs
        self._index = {_name(i): i for i in range(len(logs))}
        self._groups: dict[int, Group] = {}
        self._loads: dict[int, GroupLoad] = {}  # Of each group's last frame.
        self._late: deque[tuple[float, int, int, BlockEvent]] = deque()
        self.table = RoutingTable(
            block_size=trace.block_size,
            config=RoutingConfig(stale_after_s=1e9, max_in_flight_blocks=10**8),
            clock=lambda: clock.now_ms / 1000,
            policy=policy,
            first_ordinal=first_ordinal,
        )
        self.table.update_members(self._index, lenders=self._index if lends else ())
        for index, log in enumerate(logs):
            self._listen(index, log)

    def route(self, request_id: int) -> Routed:
        now_ms = self._clock.now_ms
        while self._late and self._late[0][0] <= now_ms:
            self._apply(*self._late.popleft()[1:])
        for index, group in self._groups.items():
            if group.is_in_run:
                step, began_ms = group.last_step(now_ms)
                load = self._loads[index]
                if load.num_steps is not None and step > load.num_steps:
                    self._clock.now_ms = began_ms
                    # Only a later frame can show requests that have come since from another
                    # gateway.
                    self._tell_load(index, replace(load, num_steps=step))
        self._clock.now_ms = now_ms
        decision = self.table.route(
            str(request_id),
            hashes=self._trace.chains[request_id],
            num_prompt_tokens=self._trace.num_input[request_id],
        )
        return Routed(
            group=self._index[decision.group],
            num_predicted_tokens=decision.predicted_cached_tokens,
            source=None if decision.source is None else self._index[decision.source],
            num_source_blocks=decision.num_source_blocks,
        )

    def frame(self, index: int, group: Group) -> None:
        """A step of the group has ended."""
        self._groups[index] = group
        load = GroupLoad(
            num_running=group.num_running,
            num_waiting=group.num_waiting,
            num_pending_prefill_tokens=group.num_pending,
            num_available_blocks=group.pool.num_available,
            num_steps=group.num_steps,
            num_prompt_tokens=group.num_prompt_tokens,
            num_hit_tokens=group.num_hit_tokens,
            num_host_tokens=group.counters.num_host_tokens,
            num_peer_tokens=group.counters.num_peer_tokens,
            peer_s=group.counters.peer_s,
        )
        self._tell_load(index, load)

    def _tell_load(self, index: int, load: GroupLoad) -> None:
        self._loads[index] = load
        # Twice, for requests take no time to get to a group here: the first frame shows them.
        self.table.update_load(_name(index), load)
        self.table.update_load(_name(index), load)

    def started(self, request_id: int, num_hit_tokens: int) -> None:
        """Its first token came."""
        self.table.started(str(request_id), num_cached_tokens=num_hit_tokens)

    def finished(self, request_id: int) -> None:
        """Its last token came."""
        self.table.completed(str(request_id))

    def _listen(self, index: int, log: EventLog) -> None:
        def on_event(seq: int, event: BlockEvent) -> None:
            if self._rng.random() < self._loss:
                return
            if self._lag_ms:
                self._late.append((self._clock.now_ms + self._lag_ms, index, seq, event))
            else:
                self._apply(index, seq, event)

        log.subscribe(on_event)

    def _apply(self, index: int, seq: int, event: BlockEvent) -> None:
        log = self._logs[index]
        batch = EventBatch(epoch=log.epoch, first_seq=seq, events=(event,))
        answer = self.table.apply_events(_name(index), batch)
        if isinstance(answer, NeedsResync):
            self.table.apply_events(_name(index), log.since(answer.next_seq))


def _name(index: int) -> GroupId:
    return GroupId(f"group-{index:05}")
