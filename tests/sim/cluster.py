"""A simulated cluster of real parts: groups, gateways, and an operator that replaces lost ones.

Real are `GroupEngine` with scheduler, block pool and events, `EngineLoop`, `GroupService`,
`GroupClient`, `Groups`, `RoutingTable`, `ModelService` and the `Inference` service. Simulated are
the model, the network and Ray Serve. The latter's place is taken by *operations*: it notices after
a delay that a process is dead or an engine has failed, starts another, and sends gateways the new
list of groups, also after a delay.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.sim.loop import Process, SimLoop
from tests.sim.model import EOS, HashExecutor, HashModel, SimEngineLoop, StepCost
from tests.sim.network import GroupLinkOver, Network

from quire.cluster.edge.grpc_server import InferenceService
from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.service import ModelService
from quire.cluster.group.service import GroupService
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.group_link import GroupLink
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.config import RoutingConfig
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.worker.group_engine import GroupEngine
from quire.worker.model.facts import ModelFacts
from quire.worker.request.config import EngineConfig

MODEL = "hash"
BLOCK_SIZE = 4
MAX_MODEL_LEN = 256


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The settings of a cluster."""

    num_groups: int = 2
    num_gateways: int = 1
    num_blocks: int = 200
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_num_waiting: int = 1000
    cost: StepCost = field(default_factory=StepCost)
    handover_s: float = 5.0
    """The last part of a drain, in which streams are handed over."""
    client: GroupClientConfig = field(default_factory=GroupClientConfig)
    gateway: GatewayConfig = field(
        default_factory=lambda: GatewayConfig(completion=CompletionConfig(group_wait_s=30.0))
    )
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    detect_s: float = 2.0
    """Longest time until operations notice a dead process or a failed engine."""
    start_s: float = 5.0
    """Longest time from then until the replacement serves."""
    news_s: float = 1.0
    """Longest time until a gateway receives the new list of groups."""


class SimGroup:
    """One incarnation of a replica group."""

    def __init__(self, cluster: "Cluster", name: str, address: str, epoch: int) -> None:
        self.name, self.address, self.epoch = name, address, epoch
        self.place = Network.place_of(address)
        self.process = Process(cluster.loop, address)
        plan = cluster.plan
        self.executor = HashExecutor(
            cluster.model, num_blocks=plan.num_blocks, block_size=BLOCK_SIZE
        )
        self.process.run(lambda: self._start(cluster))

    def _start(self, cluster: "Cluster") -> None:
        plan, facts = cluster.plan, cluster.facts
        config = EngineConfig(
            model=Path("none"),
            block_size=BLOCK_SIZE,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_num_waiting=plan.max_num_waiting,
        )
        self.engine = GroupEngine(
            config, facts, self.executor, clock=cluster.loop.time, epoch=self.epoch
        )
        self.engine_loop = SimEngineLoop(
            self.engine, cost=plan.cost, max_step_tokens=plan.max_num_batched_tokens
        )
        self.service = GroupService(
            self.engine_loop,
            group_pb2.GroupDescription(
                group_id=self.name,
                epoch=self.epoch,
                model=MODEL,
                model_fingerprint=facts.fingerprint,
                kv_dtype=facts.kv_dtype,
                block_size=BLOCK_SIZE,
                max_model_len=self.engine.max_model_len,
                vocab_size=facts.vocab_size,
                num_blocks=plan.num_blocks,
                max_num_seqs=plan.max_num_seqs,
            ),
            heartbeat_s=plan.client.silence_timeout_s / 8,
            gateway_timeout_s=plan.client.silence_timeout_s * 3,
        )
        self.engine_loop.watch(step_deadline_s=plan.client.step_deadline_s)
        cluster.network.listen(self.address, self.process, self.service)

    @property
    def is_serving(self) -> bool:
        return not (self.process.is_dead or self.engine_loop.failed.done())


class SimGateway:
    """One incarnation of a gateway."""

    def __init__(self, cluster: "Cluster", name: str, life: int) -> None:
        self.name = name
        self.place = f"{name}-{life}"
        self.address = f"{self.place}:1"
        self.process = Process(cluster.loop, self.address)
        self._network = cluster.network
        self.process.run(lambda: self._start(cluster))

    def _start(self, cluster: "Cluster") -> None:
        plan, clock = cluster.plan, cluster.loop.time
        self.table = RoutingTable(block_size=BLOCK_SIZE, config=plan.routing, clock=clock)
        self.groups = Groups(
            table=self.table,
            expected=Expectation(model=MODEL, block_size=BLOCK_SIZE),
            config=plan.client,
            connect=self._connect,
            jitter=cluster.rng.uniform,
        )
        self.gateway = ModelService(
            model=MODEL,
            tokenizer=cluster.model.tokenizer,
            groups=self.groups,
            table=self.table,
            config=plan.gateway,
            clock=clock,
        )
        self.models = Models(self.gateway)
        cluster.network.listen(self.address, self.process, InferenceService(self.models))

    @contextlib.asynccontextmanager
    async def _connect(self, address: str) -> AsyncIterator[GroupLink]:
        async with self._network.connect(
            address, client=self.process, place=self.place
        ) as connection:
            yield GroupLinkOver(connection)

    async def hear_of_groups(self, groups: "list[SimGroup]") -> None:
        """Sets the gateway's list of groups; calls run in the order of arrival."""
        self.groups.set_addresses([group.address for group in groups])


class Cluster:
    """Starts the groups and gateways of ``plan``, and replaces those that are lost."""

    def __init__(
        self,
        loop: SimLoop,
        rng: random.Random,
        *,
        network: Network,
        model: HashModel,
        plan: ClusterPlan,
    ) -> None:
        self.loop, self.rng, self.network, self.model, self.plan = loop, rng, network, model, plan
        self.facts = ModelFacts(
            name=MODEL,
            fingerprint="hash-1",
            vocab_size=model.tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
            kv_dtype="float32",
        )
        self.groups: list[SimGroup] = []
        """Groups whose processes live as far as operations know."""
        self.gateways: list[SimGateway] = []
        self.num_replaced = 0
        self._lives = itertools.count(1)
        for number in range(plan.num_groups):
            self.start_group(f"g{number}")
        for number in range(plan.num_gateways):
            self.start_gateway(f"gw{number}")
        loop.create_task(self._operate())

    def start_group(self, name: str, *, address: str | None = None) -> SimGroup:
        life = next(self._lives)
        group = SimGroup(self, name, address or f"{name}-{life}:1", epoch=life)
        self.groups.append(group)
        self.tell_gateways()
        return group

    def start_gateway(self, name: str) -> SimGateway:
        gateway = SimGateway(self, name, next(self._lives))
        self.gateways.append(gateway)
        self._tell(gateway, at_once=True)
        return gateway

    def tell_gateways(self) -> None:
        for gateway in self.gateways:
            self._tell(gateway, at_once=False)

    def _tell(self, gateway: SimGateway, *, at_once: bool) -> None:
        """Sends the list as it is at arrival, so that an old one never follows a newer one."""

        def tell() -> None:
            if not gateway.process.is_dead:
                gateway.process.spawn(gateway.hear_of_groups(self.groups))

        delay_s = 0.0 if at_once else self.rng.uniform(0, self.plan.news_s)
        self.loop.call_later(delay_s, tell)

    def remove(self, group: SimGroup) -> None:
        """Takes a group out of the membership; its process continues."""
        self.groups.remove(group)
        self.tell_gateways()

    async def _operate(self) -> None:
        """Replaces dead processes and groups whose engines have failed."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.0) * self.plan.detect_s)
            for group in [group for group in self.groups if not group.is_serving]:
                self.remove(group)
                self.network.kill(group.process, resets=True)
                self._later(group)
            for gateway in [gateway for gateway in self.gateways if gateway.process.is_dead]:
                self.gateways.remove(gateway)
                self._later(gateway)

    def _later(self, gone: SimGroup | SimGateway) -> None:
        """Starts a replacement of the same name after a delay; a group's may reuse the address."""
        self.num_replaced += 1
        delay_s = self.rng.uniform(0.2, 1.0) * self.plan.start_s
        if isinstance(gone, SimGateway):
            self.loop.call_later(delay_s, lambda: self.start_gateway(gone.name))
            return
        address = gone.address if self.rng.random() < 0.3 else None
        self.loop.call_later(delay_s, lambda: self.start_group(gone.name, address=address))
