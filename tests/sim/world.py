"""One run of the simulation: a cluster, its clients and its faults, all drawn from one seed.

During the run every chunk that a client receives is checked. Then faults stop and the cluster gets
time to recover. After that no request, held block, reservation or stream may be left, and each
gateway's directory must equal the contents of the groups' pools.

Every event is hashed with its time, in order, into the *digest*. Equal seeds must have equal
digests; otherwise something depends on more than the seed.
"""

import asyncio
import hashlib
import random
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from google.protobuf.message import Message
from tests.sim.asks import Ask, Wrong
from tests.sim.clients import Clients, Load
from tests.sim.cluster import Cluster, ClusterPlan, SimGateway
from tests.sim.faults import Chaos, ChaosPlan
from tests.sim.judge import Judge
from tests.sim.loop import SimLoop, simulate
from tests.sim.model import HashModel, make_tokenizer
from tests.sim.network import Network, NetworkConfig

from quire.router import stages
from quire.router.prefix_index.directory import GroupId
from quire.v1 import group_pb2

_TAIL = 60
"""Number of trace lines that a failure shows."""
_MIN_APART_TOKENS = 8
"""Prompts are short here, and most must go to prefill groups where there are any."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a run."""

    cluster: ClusterPlan = field(default_factory=ClusterPlan)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    load: Load = field(default_factory=Load)
    chaos: ChaosPlan = field(default_factory=ChaosPlan)
    length_s: float = 100.0
    settle_s: float = 100.0
    """Longest time after the last fault in which requests wait and no client receives anything."""
    quiet_s: float = 60.0
    """Time after the last request's end until the directory must be exact and all else empty."""


@dataclass(frozen=True, kw_only=True)
class Result:
    digest: str
    simulated_s: float
    outcomes: Counter[str]
    faults: Counter[str]
    num_replaced: int
    """Number of groups and gateways that operations replaced because they had died or failed."""
    asks: list[Ask]


class World:
    """A run in progress."""

    def __init__(self, loop: SimLoop, plan: Plan, *, seed: int) -> None:
        self.loop, self.plan = loop, plan
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._hash = hashlib.blake2b(digest_size=16)
        self.raised: list[BaseException] = []
        loop.set_exception_handler(self._on_exception)

        def rng(part: str) -> random.Random:
            return random.Random(f"{seed} {part}")  # Alike in every process.

        self.rng = rng("script")
        model = HashModel(make_tokenizer())
        self.network = Network(loop, rng("network"), config=plan.network, trace=self._message)
        self.cluster = Cluster(
            loop, rng("cluster"), network=self.network, model=model, plan=plan.cluster
        )
        self.clients = Clients(self.cluster, rng("clients"), load=plan.load, trace=self.note)
        self.chaos = Chaos(self.cluster, rng("chaos"), plan=plan.chaos, trace=self.note)
        self.clients.check_end = Judge(self.cluster, self.clients, self.chaos).check
        self._watcher = loop.create_task(self._watch())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        """Adds an event to the digest and to the trace that a failure shows."""
        self.tail.append(self._add(text))

    def _add(self, text: str) -> str:
        line = f"{self.loop.time():.9f} {text}"
        self._hash.update(line.encode())
        return line

    async def live(self) -> None:
        """Lets clients arrive and faults happen according to the plan."""
        until_s = self.plan.length_s
        await asyncio.gather(self.clients.arrive(until_s=until_s), self.chaos.run(until_s=until_s))

    async def run(self, script: "Script | None") -> Result:
        loop = self.loop
        await (self.live() if script is None else script(self))
        await self.settle()
        outcomes = Counter(ask.outcome for ask in self.clients.asks)
        return Result(
            digest=self.digest,
            simulated_s=loop.time(),
            outcomes=outcomes,
            faults=Counter(fault.kind for fault in self.chaos.faults),
            num_replaced=self.cluster.num_replaced,
            asks=self.clients.asks,
        )

    async def settle(self) -> None:
        """Lets the cluster recover, and checks what is left.

        Raises:
            Wrong: A request did not end, or something is left over.
        """
        await self.chaos.stop()
        self.note("faults are over")
        begin_s = self.loop.time()
        while self.clients.running:
            await asyncio.sleep(1)
            self.check()
            newest_s = max(ask.last_s for ask in self.clients.asks)
            if self.loop.time() > max(newest_s, begin_s) + self.plan.settle_s:
                ask = next(iter(self.clients.running.values()))
                raise Wrong(f"nothing goes on any more, and {ask} has not ended")
        await asyncio.sleep(self.plan.quiet_s)
        self.check()
        self._check_nothing_is_left()
        self._check_directories()

    def check(self) -> None:
        """Raises the first error found so far."""
        for error in (*self.clients.wrong, *self.network.failures, *self.raised):
            raise error

    async def _watch(self) -> None:
        """Checks once a second what must always hold."""
        while True:
            await asyncio.sleep(1)
            self.check()
            for group in self.cluster.groups:
                stats = group.engine.stats()
                parts = stats.num_free_blocks, stats.num_cached_blocks, stats.num_held_blocks
                if sum(parts) != stats.num_total_blocks or min(parts) < 0:
                    raise Wrong(f"the blocks of {group.address} do not add up: {stats}")

    def _check_nothing_is_left(self) -> None:
        if len(self.cluster.groups) != self.plan.cluster.num_groups:
            raise Wrong(f"{len(self.cluster.groups)} groups are left")
        for group in self.cluster.groups:
            stats = group.engine.stats()
            left = stats.num_held_blocks, stats.num_running, stats.num_waiting
            if any(left) or group.engine_loop.num_requests or group.engine.has_work:
                raise Wrong(f"{group.address} still has held blocks, running, waiting: {left}")
            if group.service.num_requests:
                raise Wrong(f"{group.address} still has requests: {group.service.num_requests}")
        for gateway in self.cluster.gateways:
            routing = gateway.table.stats()
            left_there = routing.num_in_flight, routing.num_in_flight_blocks
            if any((*left_there, routing.num_reserved_tokens)):
                raise Wrong(f"{gateway.name} still has requests in its table: {routing}")
            if gateway.groups.num_ready != len(self.cluster.groups):
                raise Wrong(f"{gateway.name} lacks groups: {gateway.groups.troubles()}")
            clients = [client for client, _ in gateway.groups._clients.values()]
            if any(client.num_streams for client in clients) or gateway.groups._leaving:
                raise Wrong(f"{gateway.name} still has streams")
            self._check_queue(gateway)

    def _check_queue(self, gateway: SimGateway) -> None:
        service = gateway.gateway
        admission, unrouted = service.admission, service.admission._admission._unrouted
        counts = {
            "in flight": service.num_inflight,
            "queued": admission.queued.num_requests + len(admission._waiters),
            "unbegun": sum(map(abs, admission._admission.unbegun)),
            "unrouted": unrouted.num_requests or unrouted.num_tokens > 1e-6,
            "in want of a group": gateway.groups.demand.num_requests,
            "isolated": service.pipeline.isolate.isolation.num_completions,
        }
        if any(counts.values()):
            raise Wrong(f"{gateway.name} still counts requests: {counts}")

    def _check_directories(self) -> None:
        for gateway in self.cluster.gateways:
            self._check_directory(gateway)

    def _check_directory(self, gateway: SimGateway) -> None:
        """Compares a gateway's directory with sets of the blocks in the groups' pools."""
        truth = {
            GroupId(group.name): set(group.engine._pool._block_of) for group in self.cluster.groups
        }
        directory = gateway.table._directory
        for block_hash in sorted(set().union(*truth.values())):
            believed = set(directory.longest_prefix([block_hash]))
            holders = {name for name, held in truth.items() if block_hash in held}
            if believed != holders:
                raise Wrong(
                    f"{gateway.name} believes {block_hash.hex()} to be at {sorted(believed)}, "
                    f"it is at {sorted(holders)}"
                )
        for name, held in truth.items():
            if directory.num_blocks(name) != len(held):
                raise Wrong(
                    f"{gateway.name} believes {name} to hold {directory.num_blocks(name)} blocks, "
                    f"it holds {len(held)}"
                )

    def _message(self, name: str, message: Message | None) -> None:
        if isinstance(message, group_pb2.EventBatch) and message.HasField("snapshot"):
            # Blocks of a snapshot have no order.
            stored = message.snapshot.stored
            blocks = sorted(stored[start : start + 32] for start in range(0, len(stored), 32))
            data = b"".join(blocks) + str(message.first_seq).encode()
        else:
            data = b"" if message is None else message.SerializeToString(deterministic=True)
        self._add(name)
        self._hash.update(data)

    def _on_exception(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.raised.append(error or RuntimeError(context["message"]))


Script = Callable[[World], Awaitable[None]]


def run(plan: Plan, *, seed: int, script: Script | None = None) -> Result:
    """Runs ``plan`` to its end. A ``script`` replaces random clients and faults.

    Raises:
        Wrong: The cluster broke a guarantee. The notes have the end of the trace.
        Deadlock: Every task waited and no timer was set.
    """
    world: World | None = None

    async def main(loop: SimLoop) -> Result:
        nonlocal world
        world = World(loop, plan, seed=seed)
        return await world.run(script)

    is_apart = mock.patch.object(stages, "MIN_APART_TOKENS", _MIN_APART_TOKENS)
    with _seeded_secrets(seed), is_apart:
        try:
            return simulate(main, seed=seed)
        except BaseException as error:
            if world is not None:
                error.add_note("\n".join(["the end of the trace:", *world.tail]))
            raise


@contextmanager
def _seeded_secrets(seed: int) -> Iterator[None]:
    """Derives the names and seeds that gateways draw from the run's seed."""
    rng = random.Random(f"{seed} secrets")
    with (
        mock.patch.object(secrets, "token_hex", lambda size: rng.randbytes(size).hex()),
        mock.patch.object(secrets, "randbelow", rng.randrange),
    ):
        yield
