"""Faults of a cluster: their kinds, and when they happen, drawn from the seed.

A run first draws which kinds are enabled (*swarm testing*: with all kinds always on, bugs that need
the absence of one stay hidden). Faults then begin one after the other and may overlap. Each ends by
itself; `Chaos.stop` ends the rest.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from tests.sim.cluster import Cluster, SimGateway, SimGroup
from tests.sim.loop import Process
from tests.sim.model import POISON
from tests.sim.pipes import Pipe

from quire.cluster.wire import prepared_of
from quire.v1 import group_pb2

GROUP_FAULTS = (
    "crash",
    "vanish",
    "rank failure",
    "hang",
    "freeze",
    "slow steps",
    "drain",
    "scale to zero",
    "partition",
    "half partition",
    "reset",
    "slow network",
)
GATEWAY_FAULTS = ("gateway crash", "gateway freeze")
TAMPERINGS = (
    "events lost",
    "events repeated",
    "events exchanged",
    "events forgotten",
    "frames repeated",
    "old frames",
    "submits repeated",
)
KINDS = (*GROUP_FAULTS, *GATEWAY_FAULTS, *TAMPERINGS)


@dataclass
class Fault:
    """A fault that happened. ``end_s`` is None while it lasts."""

    kind: str
    target: str
    begin_s: float
    end_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    kinds: tuple[str, ...] = ()
    pause_s: float = 20.0
    """Mean time between the beginnings of two faults."""
    max_length_s: float = 30.0
    drain_s: float = 20.0


class Chaos:
    """Injects faults into ``cluster`` as the plan allows."""

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        *,
        plan: ChaosPlan,
        trace: Callable[[str], None],
    ) -> None:
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._network = cluster.network
        self._rng = rng
        self._plan = plan
        self._trace = trace
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._stopping = asyncio.Event()
        self._old: dict[tuple[Process | None, Process | None], list[Message]] = {}
        self._withheld: dict[Pipe, Message] = {}
        if set(plan.kinds) & set(TAMPERINGS):
            self._network.tamper = self._tamper

    async def run(self, *, until_s: float) -> None:
        loop = self._cluster.loop
        kinds = [kind for kind in self._plan.kinds if kind not in TAMPERINGS]
        while kinds:
            await asyncio.sleep(self._rng.expovariate(1 / self._plan.pause_s))
            if loop.time() >= until_s:
                return
            self.begin(self._rng.choice(kinds))

    def begin(
        self, kind: str, *, group: SimGroup | None = None, length_s: float | None = None
    ) -> Fault | None:
        """Begins a fault of a running group or gateway; returns None if there is none."""
        length_s = length_s or self._rng.uniform(0.1, self._plan.max_length_s)
        target: SimGroup | SimGateway | None = group
        if target is None:
            there: Sequence[SimGroup | SimGateway] = self._groups()
            if kind in GATEWAY_FAULTS:
                there = self._gateways()
            target = self._rng.choice(there) if there else None
        if target is None:
            return None
        fault = Fault(kind, target.place, self._cluster.loop.time())
        self.faults.append(fault)
        self._trace(f"{kind} {target.place} for {length_s:.3f}")
        task = asyncio.get_running_loop().create_task(self._happen(fault, target, length_s))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return fault

    async def stop(self) -> None:
        """Ends all faults that still last."""
        self._stopping.set()
        self._network.tamper = lambda pipe, message: [message]
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _groups(self) -> list[SimGroup]:
        return [group for group in self._cluster.groups if group.is_serving]

    def _gateways(self) -> list[SimGateway]:
        return [gateway for gateway in self._cluster.gateways if not gateway.process.is_dead]

    async def _happen(self, fault: Fault, target: SimGroup | SimGateway, length_s: float) -> None:
        if isinstance(target, SimGateway):
            await self._to_gateway(fault.kind, target, length_s)
        else:
            await self._to_group(fault.kind, target, length_s)
        fault.end_s = self._cluster.loop.time()
        self._trace(f"{fault.kind} {fault.target} is over")

    async def _to_gateway(self, kind: str, gateway: SimGateway, length_s: float) -> None:
        if kind == "gateway crash":
            self._network.kill(gateway.process, resets=self._rng.random() < 0.7)
        else:
            await self._freeze(gateway.process, length_s)

    async def _to_group(self, kind: str, group: SimGroup, length_s: float) -> None:
        match kind:
            case "crash":
                self._network.kill(group.process, resets=True)
            case "vanish":
                self._network.kill(group.process, resets=False)
                await self._cut([(group.place, other) for other in self._places()], length_s)
            case "rank failure":
                group.executor.failure = "rank 1 died"
            case "hang":
                group.engine_loop.can_step.clear()
                await self._wait(length_s)
                group.engine_loop.can_step.set()
            case "freeze":
                await self._freeze(group.process, length_s)
            case "slow steps":
                group.engine_loop.slowness = self._rng.choice([3.0, 20.0])
                await self._wait(length_s)
                group.engine_loop.slowness = 1.0
            case "drain":
                await self._drain(group)
            case "scale to zero":
                await self._scale_to_zero()
            case "partition":
                gateway = self._rng.choice([*self._places(), None])
                places = self._places() if gateway is None else [gateway]
                both = [(group.place, place) for place in places]
                await self._cut(both + [pair[::-1] for pair in both], length_s)
            case "half partition":
                away = [(group.place, place) for place in self._places()]
                if self._rng.random() < 0.5:
                    away = [pair[::-1] for pair in away]
                await self._cut(away, length_s)
            case "reset":
                for connection in tuple(self._network.connections):
                    if connection.server is group.process and self._rng.random() < 0.7:
                        connection.reset("connection reset by peer")
            case "slow network":
                slow_places, more_s = self._network.slow_places, self._rng.choice([0.05, 0.5])
                slow_places[group.place] = slow_places.get(group.place, 0.0) + more_s
                await self._wait(length_s)
                slow_places[group.place] -= more_s
            case _:
                raise AssertionError(kind)

    def _places(self) -> list[str]:
        return [gateway.place for gateway in self._gateways()]

    async def _freeze(self, process: Process, length_s: float) -> None:
        process.freeze()
        await self._wait(length_s)
        process.thaw()

    async def _cut(self, pairs: list[tuple[str, str]], length_s: float) -> None:
        for pair in pairs:
            self._network.cut(*pair)
        await self._wait(length_s)
        for pair in pairs:
            self._network.heal(*pair)

    async def _drain(self, group: SimGroup) -> None:
        """Drains a group as a scale-down or rolling upgrade does; another replaces it."""
        cluster = self._cluster
        if group not in cluster.groups:
            return
        cluster.remove(group)
        cluster.start_group(group.name)
        await self._let_go(group)

    async def _scale_to_zero(self) -> None:
        """Drains all groups, and starts them again once a request waits for one."""
        cluster = self._cluster
        gone = [group for group in self._groups() if group in cluster.groups]
        for group in gone:
            cluster.remove(group)
        endings = [asyncio.create_task(self._let_go(group)) for group in gone]
        while not (self._stopping.is_set() or any(map(_has_demand, self._gateways()))):
            await asyncio.sleep(0.1)
        await asyncio.sleep(self._rng.uniform(0.2, 1.0) * cluster.plan.start_s)
        for group in gone:
            cluster.start_group(group.name)
        for ending in endings:
            await ending

    async def _let_go(self, group: SimGroup) -> None:
        drained = group.process.spawn(
            group.service.drain(
                timeout_s=self._plan.drain_s, handover_s=self._cluster.plan.handover_s
            )
        )
        await asyncio.wait([drained])
        self._network.kill(group.process, resets=True)

    async def _wait(self, length_s: float) -> None:
        try:
            async with asyncio.timeout(length_s):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _tamper(self, pipe: Pipe, message: Message) -> list[Message]:
        kinds = self._plan.kinds
        if isinstance(message, group_pb2.EventBatch):
            return list(self._tamper_events(pipe, message))
        if isinstance(message, group_pb2.GroupCommand):
            return list(self._tamper_command(pipe, message))
        if not isinstance(message, group_pb2.StepFrame) or not message.deltas:
            return [message]
        if "frames repeated" in kinds and self._rng.random() < 0.005:
            return [message, message]
        if "old frames" in kinds:
            # Also from an earlier connection between the same two processes.
            connection = pipe.call.connection
            old = self._old.setdefault((connection.server, connection.client), [])
            if self._rng.random() < 0.02:
                old.append(message)
            if old and self._rng.random() < 0.01:
                return [old.pop(self._rng.randrange(len(old))), message]
        return [message]

    def _tamper_events(self, pipe: Pipe, message: group_pb2.EventBatch) -> Iterator[Message]:
        kinds, rng = self._plan.kinds, self._rng
        if "events lost" in kinds and rng.random() < 0.05:
            return
        if "events exchanged" in kinds and pipe not in self._withheld and rng.random() < 0.05:
            self._withheld[pipe] = message
            return
        if "events forgotten" in kinds and message.events and rng.random() < 0.05:
            # The numbers are kept, so only a digest can show that the event is missing.
            rng.choice(message.events).Clear()
        yield message
        if "events repeated" in kinds and rng.random() < 0.05:
            yield message
        if pipe in self._withheld:
            yield self._withheld.pop(pipe)

    def _tamper_command(self, pipe: Pipe, message: group_pb2.GroupCommand) -> Iterator[Message]:
        yield message
        if not message.HasField("submit") or "submits repeated" not in self._plan.kinds:
            return
        if self._rng.random() < 0.2:
            yield message
        # A late copy of a poison would kill the group again without a request to blame.
        is_poison = POISON in prepared_of(message.submit, request_id="").prompt_token_ids
        if self._rng.random() < 0.2 and not is_poison:
            delay_s = self._rng.uniform(0, 5)
            self._cluster.loop.call_later(delay_s, self._repeat, pipe, message)

    def _repeat(self, pipe: Pipe, message: Message) -> None:
        if not self._stopping.is_set():
            pipe.inject(message)


def _has_demand(gateway: SimGateway) -> bool:
    return gateway.groups.demand.num_requests > 0
