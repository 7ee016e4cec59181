"""Simulated gateways, which route with the router's policies.

There are two kinds. `FlatGateway` keeps only the state that policies read, in flat structures.
`TableGateway` is the router's own `RoutingTable`, directory and event protocol, about ten times
slower; it verifies that the flat one omits nothing that matters.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from quire.router.config import RoutingConfig
from quire.router.members import MANY
from quire.router.policies.decide import PolicyOfMany, choose, choose_among_many, usable_tokens
from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupState, Policy, RouteRequest
from quire.router.policies.step_clock import StepClock
from quire.router.prefix_index.directory import GroupId, NeedsResync
from quire.router.simulate.clock import Clock
from quire.router.simulate.group import Group
from quire.router.simulate.holders import Holders
from quire.router.simulate.pool import Chain
from quire.router.simulate.trace import Trace
from quire.router.table import GroupLoad, RoutingTable
from quire.worker.api.events import BlockEvent, EventBatch, EventLog
from quire.worker.api.hashing import BlockHash


class SimulatedGateway(Protocol):
    def route(self, request_id: int) -> tuple[int, int]:
        """The group that takes the request, and how many tokens it is expected to find."""

    def frame(self, index: int, group: Group) -> None:
        """A step of the group has ended."""

    def started(self, request_id: int, index: int, num_hit_tokens: int) -> None:
        """Its first token came."""

    def finished(self, request_id: int, index: int) -> None:
        """Its last token came."""


class FlatGateway:
    def __init__(
        self,
        *,
        trace: Trace,
        clock: Clock,
        num_groups: int,
        policy: Policy,
        holders: Holders,
        first_ordinal: int = 0,
        many: int = MANY,
    ) -> None:
        """``many`` groups are looked at at once, where the policy can: as in `RoutingTable`."""
        self._trace = trace
        self._clock = clock
        self._policy = policy
        self._holders = holders
        self._states = [GroupState(group=_name(i)) for i in range(num_groups)]
        self._at_once: tuple[PolicyOfMany, Loads] | None = None
        if num_groups >= many and isinstance(policy, PolicyOfMany):
            self._at_once = policy, Loads(self._states)
        self._clocks = [StepClock() for _ in range(num_groups)]
        self._groups: dict[int, Group] = {}
        self._no_overlap = [0] * num_groups
        self._coming: dict[BlockHash, dict[int, int]] = {}  # By block and bit: requests in flight.
        self._blocks: dict[int, Sequence[BlockHash]] = {}  # By request, counted in `_coming`.
        self._requests: dict[int, RouteRequest] = {}
        self._ordinal = first_ordinal

    def route(self, request_id: int) -> tuple[int, int]:
        trace, states = self._trace, self._states
        if self._policy.reads_steps:
            for index, group in self._groups.items():
                if group.is_in_run:
                    self._see_step(index, *group.last_step(self._clock.now_ms))
                    self._changed(index)
        chain = trace.chains[request_id]
        num_tokens = trace.num_input[request_id]
        held = self._holders.lengths(chain)
        overlap = self._overlap(chain, held)
        request = RouteRequest(
            hashes=chain,
            num_prompt_tokens=num_tokens,
            block_size=trace.block_size,
            ordinal=self._ordinal,
            now_s=self._clock.now_ms / 1000,
        )
        self._ordinal += 1
        hits = usable_tokens(request, overlap)
        if self._at_once:
            array = np.array(hits, dtype=float)
            policy, loads = self._at_once
            index, _ = choose_among_many(policy, request, loads, array)
        else:
            index, _ = choose(self._policy, request, states, hits)
        state = states[index]
        self._policy.routed(request, state.group)
        state.num_reserved_requests += 1
        state.num_reserved_tokens += num_tokens - hits[index]
        self._changed(index)
        self._requests[request_id] = request
        self._remember(request_id, chain[held.get(1 << index, 0) :], 1 << index)
        return index, hits[index]

    def _overlap(self, chain: Chain, held: dict[int, int]) -> list[int]:
        """The prefix that each group holds, continued by requests in flight."""
        overlap, coming, size = self._no_overlap.copy(), self._coming, len(chain)
        for bit in {**held, **coming.get(chain[0], {})} if chain else ():
            length = held.get(bit, 0)
            while length < size and bit in coming.get(chain[length], ()):
                length += 1
            overlap[bit.bit_length() - 1] = length
        return overlap

    def frame(self, index: int, group: Group) -> None:
        # The group had every request routed to it when the step ended.
        state = self._states[index]
        state.num_reserved_requests = state.num_reserved_tokens = 0
        state.num_pending_prefill_tokens = group.num_pending
        state.num_running = group.num_running
        state.num_waiting = group.num_waiting
        state.num_available_blocks = group.pool.num_available
        state.num_blocks = max(state.num_blocks or 0, state.num_available_blocks)
        self._groups[index] = group
        if self._policy.reads_steps:
            self._see_step(index, group.num_steps, self._clock.now_ms)
        self._changed(index)

    def _changed(self, index: int) -> None:
        if self._at_once:
            self._at_once[1].put(index, self._states[index])

    def _see_step(self, index: int, step: int, at_ms: float) -> None:
        state, clock = self._states[index], self._clocks[index]
        clock.frame(
            step=step,
            at_s=at_ms / 1000,
            num_queued=state.num_pending_prefill_tokens,
            is_idle=not (state.num_running or state.num_waiting),
        )
        state.step_began_s, state.step_s = clock.began_s, clock.length_s
        state.num_step_tokens = clock.num_tokens

    def started(self, request_id: int, index: int, num_hit_tokens: int) -> None:
        pass

    def finished(self, request_id: int, index: int) -> None:
        self._policy.finished(self._requests.pop(request_id), self._states[index].group)
        bit, coming = 1 << index, self._coming
        for block in self._blocks.pop(request_id):
            counts = coming[block]
            if counts[bit] > 1:
                counts[bit] -= 1
            elif len(counts) > 1:
                del counts[bit]
            else:
                del coming[block]

    def _remember(self, request_id: int, blocks: Sequence[BlockHash], bit: int) -> None:
        coming = self._coming
        self._blocks[request_id] = blocks
        for block in blocks:
            counts = coming.get(block)
            if counts is None:
                coming[block] = {bit: 1}
            else:
                counts[bit] = counts.get(bit, 0) + 1


class TableGateway:
    """The real table; events come ``lag_ms`` late and lost ones are asked for again."""

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
    ) -> None:
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
        self.table.update_members(self._index)
        for index, log in enumerate(logs):
            self._listen(index, log)

    def route(self, request_id: int) -> tuple[int, int]:
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
        return self._index[decision.group], decision.predicted_cached_tokens

    def frame(self, index: int, group: Group) -> None:
        self._groups[index] = group
        load = GroupLoad(
            num_running=group.num_running,
            num_waiting=group.num_waiting,
            num_pending_prefill_tokens=group.num_pending,
            num_available_blocks=group.pool.num_available,
            num_steps=group.num_steps,
        )
        self._tell_load(index, load)

    def _tell_load(self, index: int, load: GroupLoad) -> None:
        self._loads[index] = load
        # Twice, for requests take no time to get to a group here: the first frame shows them.
        self.table.update_load(_name(index), load)
        self.table.update_load(_name(index), load)

    def started(self, request_id: int, index: int, num_hit_tokens: int) -> None:
        self.table.started(str(request_id), num_cached_tokens=num_hit_tokens)

    def finished(self, request_id: int, index: int) -> None:
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
