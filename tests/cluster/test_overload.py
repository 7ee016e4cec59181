"""A trivial model of a cluster under load in virtual time, with the real admission and routing.

A group computes steps one after another. A step takes a fixed time, and more for each prompt token
and each decode in it. Sequences begin in order of arrival while there are slots and room for all of
their KV. Each step's frame reaches every gateway a little later. Only the caller's seed decides
what is random.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import quantiles

import pytest

from quire.cluster.errors import Overloaded
from quire.cluster.serving.admission import Admission
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Stage, Ticket
from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable

BLOCK_SIZE = 16
LATENCY_S = 0.001
WARM_UP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speed and size of a group."""

    num_slots: int = 16
    num_blocks: int = 100_000
    max_tokens_in_step: int = 512
    step_s: float = 0.005
    prefill_token_s: float = 0.0001
    decode_s: float = 0.0005


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load of Poisson arrivals, with sizes uniform in these ranges."""

    per_s: float
    prompt: tuple[int, int] = (50, 300)
    output: tuple[int, int] = (20, 100)
    priorities: Sequence[int] = (0,)


@dataclass(eq=False)
class Client:
    """One request and its outcome."""

    ticket: Ticket
    num_output: int
    arrival_s: float
    first_token_s: float | None = None
    end_s: float | None = None
    refused_s: float | None = None


@dataclass(eq=False)
class _Sequence:
    client: Client
    gateway: "ModelGateway"
    num_prefill: int
    num_output: int

    @property
    def num_blocks(self) -> int:
        tokens = self.client.ticket.num_prompt_tokens + self.client.num_output
        return -(-tokens // BLOCK_SIZE)


class World:
    """The clock and its due events."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, *, until_s: float = float("inf")) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()


class ModelGroup:
    def __init__(self, world: World, name: str, hardware: Hardware) -> None:
        self.name = name
        self.gateways: list[ModelGateway] = []
        self._world = world
        self._hardware = hardware
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._free_blocks = hardware.num_blocks
        self._is_busy = False
        self._num_prompt = self._num_output = 0

    def submit(self, sequence: _Sequence) -> None:
        self._waiting.append(sequence)
        if not self._is_busy:
            self._step()

    def load(self) -> GroupLoad:
        pending = sum(each.num_prefill for each in (*self._waiting, *self._running))
        return GroupLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pending_prefill_tokens=pending,
            num_available_blocks=self._free_blocks,
            num_prompt_tokens=self._num_prompt,
            num_output_tokens=self._num_output,
            max_num_seqs=self._hardware.num_slots,
            num_gateways=len(self.gateways),
        )

    def _step(self) -> None:
        hardware = self._hardware
        budget = hardware.max_tokens_in_step - len(self._running)
        while (
            self._waiting
            and len(self._running) < hardware.num_slots
            and self._waiting[0].num_blocks <= self._free_blocks
            and sum(each.num_prefill for each in self._running) < budget
        ):
            sequence = self._waiting.popleft()
            self._free_blocks -= sequence.num_blocks
            self._num_prompt += sequence.num_prefill
            self._running.append(sequence)
        chunks = []
        for sequence in self._running:
            chunk = min(sequence.num_prefill, max(budget, 0))
            budget -= chunk
            chunks.append((sequence, chunk))
        self._is_busy = bool(chunks)
        if chunks:
            num_prefill = sum(chunk for _, chunk in chunks)
            num_decodes = sum(sequence.num_prefill == 0 for sequence in self._running)
            step_s = (
                hardware.step_s
                + hardware.prefill_token_s * num_prefill
                + hardware.decode_s * num_decodes
            )
            self._world.after(step_s, lambda: self._end_step(chunks))

    def _end_step(self, chunks: list[tuple[_Sequence, int]]) -> None:
        for sequence, chunk in chunks:
            sequence.num_prefill -= chunk
            if sequence.num_prefill == 0:
                sequence.num_output -= 1
                self._num_output += 1
                is_last = sequence.num_output == 0
                if is_last:
                    self._running.remove(sequence)
                    self._free_blocks += sequence.num_blocks
                self._tell_token(sequence, is_last=is_last)
        load = self.load()
        for gateway in self.gateways:
            self._world.after(LATENCY_S, partial(gateway.frame, self, load))
        self._step()

    def _tell_token(self, sequence: _Sequence, *, is_last: bool) -> None:
        gateway, client = sequence.gateway, sequence.client
        self._world.after(LATENCY_S, lambda: gateway.token(client, is_last=is_last))


class ModelGateway:
    def __init__(self, world: World, groups: Sequence[ModelGroup], config: AdmissionConfig) -> None:
        self._world = world
        self._groups = {GroupId(group.name): group for group in groups}
        self.table = RoutingTable(block_size=BLOCK_SIZE, clock=lambda: world.now_s)
        self.table.update_members(self._groups)
        self.capacity = Capacity(block_size=BLOCK_SIZE)
        self.admission = Admission(config, self.capacity)
        self._clients: dict[Ticket, Client] = {}
        for group in groups:
            group.gateways.append(self)
            self.frame(group, group.load())

    def arrive(self, client: Client) -> None:
        now_s = self._world.now_s
        try:
            displaced = self.admission.offer(client.ticket, self.table.loads(), now_s=now_s)
        except Overloaded:
            client.refused_s = now_s
            return
        self._clients[client.ticket] = client
        for ticket in displaced:
            self._clients.pop(ticket).refused_s = now_s
        if client.ticket.stage is Stage.RELEASED:
            self._send(client)

    def forecast_s(self) -> float:
        """The smallest ``max_queue_wait_s`` that would admit a request now, within 3 %."""
        states, waiting = self.table.loads(), self.admission.queued_load
        tokens_each = waiting.num_tokens / max(waiting.num_requests, 1)
        wait_s = 0.1
        while (
            self.capacity.room(states, wait_s=wait_s, tokens_each=tokens_each)
            <= waiting.num_requests
        ):
            wait_s *= 1.03
        return wait_s

    def frame(self, group: ModelGroup, load: GroupLoad) -> None:
        is_awaited = self.admission.queued_load.num_requests > 0
        self.table.update_load(GroupId(group.name), load, is_awaited=is_awaited)
        for ticket in self.admission.release(self.table.loads()):
            self._send(self._clients[ticket])

    def token(self, client: Client, *, is_last: bool) -> None:
        ticket, name = client.ticket, str(client.ticket.number)
        self.capacity.generated(1)
        if client.first_token_s is None:
            client.first_token_s = self._world.now_s
            self.table.started(name, num_cached_tokens=0)
        self.admission.took(ticket, num_tokens=1)
        if is_last:
            client.end_s = self._world.now_s
            self.capacity.ended(1)
            self.table.completed(name)
            self.admission.leave(ticket)
            del self._clients[ticket]

    def _send(self, client: Client) -> None:
        ticket = client.ticket
        decision = self.table.route(
            str(ticket.number), hashes=(), num_prompt_tokens=ticket.num_prompt_tokens
        )
        self.capacity.asked(ticket.max_tokens)
        self.admission.routed(ticket)
        sequence = _Sequence(client, self, ticket.num_prompt_tokens, client.num_output)
        group = self._groups[decision.group]
        self._world.after(LATENCY_S, lambda: group.submit(sequence))


@dataclass
class Outcome:
    """The outcomes of a run's requests."""

    clients: list[Client]
    """Requests of the load, without the warm-up's."""
    completed: list[Client] = field(init=False)
    refused: list[Client] = field(init=False)

    def __post_init__(self) -> None:
        self.completed = [client for client in self.clients if client.end_s is not None]
        self.refused = [client for client in self.clients if client.refused_s is not None]

    @property
    def num_lost(self) -> int:
        return len(self.clients) - len(self.completed) - len(self.refused)

    def ttft_s(self, percent: int) -> float:
        times = [
            client.first_token_s - client.arrival_s
            for client in self.completed
            if client.first_token_s is not None
        ]
        return quantiles(times, n=100)[percent - 1]

    @property
    def completed_per_s(self) -> float:
        """Completed requests per second in the last three quarters of the time of arrivals."""
        begin_s, last_s = self.clients[0].arrival_s, self.clients[-1].arrival_s
        begin_s += (last_s - begin_s) / 4
        ends = [client.end_s for client in self.completed if client.end_s is not None]
        return sum(begin_s < end_s <= last_s for end_s in ends) / (last_s - begin_s)


def simulate(
    load: Load,
    *,
    hardware: Hardware,
    num_groups: int = 2,
    num_gateways: int = 1,
    active_gateways: int | None = None,
    duration_s: float = 30.0,
    warm_up_per_s: float = 0.0,
    seed: int = 1,
    **config: float,
) -> Outcome:
    """Sends ``load`` for ``duration_s``, spread over the active gateways, and lets all requests
    end. A warm-up of `WARM_UP_S` at ``warm_up_per_s`` comes first and is not counted."""
    world = World()
    groups = [ModelGroup(world, f"g{number}", hardware) for number in range(num_groups)]
    settings = AdmissionConfig(**{"max_queue_wait_s": 1.0, **config})  # type: ignore[arg-type]
    gateways = [ModelGateway(world, groups, settings) for _ in range(num_gateways)]
    rng = random.Random(seed)
    clients: list[Client] = []
    arrival_s, begin_s = 0.0, WARM_UP_S if warm_up_per_s else 0.0
    while True:
        arrival_s += rng.expovariate(load.per_s if arrival_s >= begin_s else warm_up_per_s)
        if arrival_s >= begin_s + duration_s:
            break
        num_output = rng.randint(*load.output)
        ticket = Ticket(
            num_prompt_tokens=rng.randint(*load.prompt),
            max_tokens=load.output[1],
            priority=rng.choice(load.priorities),
        )
        client = Client(ticket, num_output, arrival_s)
        clients.append(client)
        gateway = rng.choice(gateways[: active_gateways or num_gateways])
        world.after(arrival_s, partial(gateway.arrive, client))
    world.run()
    return Outcome([client for client in clients if client.arrival_s >= begin_s])


HARDWARE = {
    "slots": Hardware(),
    "prefill": Hardware(num_slots=64, prefill_token_s=0.0005),
    "blocks": Hardware(num_slots=64, num_blocks=300),
}
SIZES = {
    "slots": {},
    "prefill": {"prompt": (200, 800), "output": (5, 30)},
    "blocks": {"prompt": (50, 600), "output": (20, 200)},
}
LIMITS = sorted(HARDWARE)
BURSTS = {
    "small": Hardware(
        num_slots=128, max_tokens_in_step=2048, prefill_token_s=1 / 4000, decode_s=0.0008
    ),
    "large": Hardware(
        num_slots=128, max_tokens_in_step=2048, step_s=0.03, prefill_token_s=1 / 400, decode_s=0.004
    ),
}
"""Speeds of two models on two cores."""


def run(limit: str, *, per_s: float, num_gateways: int = 1) -> Outcome:
    load = Load(per_s=per_s, **SIZES[limit])
    return simulate(
        load, hardware=HARDWARE[limit], num_gateways=num_gateways, warm_up_per_s=per_s / 3
    )


@cache
def capacity_per_s(limit: str) -> float:
    """Requests completed per second under permanent overload."""
    return run(limit, per_s=40.0).completed_per_s


@cache
def at(limit: str, factor: float, *, num_gateways: int = 1) -> Outcome:
    """The outcome at a multiple of capacity."""
    return run(limit, per_s=factor * capacity_per_s(limit), num_gateways=num_gateways)


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_at_three_times_its_capacity_what_is_accepted_keeps_its_latency(limit: str) -> None:
    at_capacity, over = at(limit, 1.0), at(limit, 3.0)
    assert over.ttft_s(99) <= 2 * at_capacity.ttft_s(99)
    assert over.completed_per_s > 0.9 * capacity_per_s(limit), "groups do not fall idle"


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("num_gateways", [1, 4])
def test_every_request_is_completed_or_refused_on_arrival(limit: str, num_gateways: int) -> None:
    over = at(limit, 3.0, num_gateways=num_gateways)
    assert over.num_lost == 0
    assert len(over.completed) + len(over.refused) == len(over.clients)
    assert all(client.refused_s == client.arrival_s for client in over.refused)
    assert all(client.first_token_s is None for client in over.refused)


@pytest.mark.quick_cells("slots")
@pytest.mark.parametrize("limit", LIMITS)
def test_below_capacity_nearly_nothing_is_refused(limit: str) -> None:
    below = at(limit, 0.7)
    assert len(below.refused) <= 0.02 * len(below.clients)


@pytest.mark.quick_cells("slots")
@pytest.mark.parametrize("limit", LIMITS)
def test_four_gateways_do_not_admit_four_times_as_much(limit: str) -> None:
    one, four = at(limit, 3.0), at(limit, 3.0, num_gateways=4)
    assert four.ttft_s(50) < 2 * one.ttft_s(50)
    assert four.ttft_s(99) < 2 * one.ttft_s(99)
    assert four.completed_per_s > 0.9 * one.completed_per_s


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(BURSTS))
def test_a_burst_is_served_as_soon_as_was_forecast_once_a_burst_was_seen(model: str) -> None:
    """The group's first prompts were slow: 40 times as long for each token."""
    world = World()
    slow = replace(BURSTS[model], prefill_token_s=40 * BURSTS[model].prefill_token_s)
    group = ModelGroup(world, "g", slow)
    gateway = ModelGateway(world, [group], AdmissionConfig())

    def burst(num_clients: int) -> tuple[float, float]:
        """Forecast and actual wait of the last request."""
        for _ in range(num_clients):
            forecast_s, begin_s = gateway.forecast_s(), world.now_s
            client = Client(Ticket(num_prompt_tokens=340, max_tokens=64), 64, begin_s)
            gateway.arrive(client)
        world.run()
        assert client.first_token_s is not None
        return forecast_s, client.first_token_s - begin_s

    burst(8)
    group._hardware = BURSTS[model]
    burst(256)
    for num_clients in (32, 128, 256):
        forecast_s, truth_s = burst(num_clients)
        assert forecast_s == pytest.approx(truth_s, rel=0.4)
