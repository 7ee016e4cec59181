"""Bursts of clients at a server that has just started and has no measured speeds."""

import asyncio

import pytest
from tests.sim.asks import Ask
from tests.sim.clients import Load
from tests.sim.cluster import BLOCK_SIZE, ClusterPlan
from tests.sim.model import StepCost
from tests.sim.world import Plan, World, run

from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.serving.admission_config import AdmissionConfig

NUM_SHARED, NUM_OWN, NUM_OUTPUT = 48 * BLOCK_SIZE, 3 * BLOCK_SIZE, 16
COST = StepCost(step_s=0.01, token_s=0.002)
"""Speed of a small model on two cores with prompts of 768 shared and 48 own tokens. It is scaled to
the prompts here, which have a quarter of the length: 100 of them take 3 s."""

DEFAULT = AdmissionConfig()


def plan(*, num_slots: int, admission: AdmissionConfig = DEFAULT) -> Plan:
    cluster = ClusterPlan(
        num_groups=1,
        num_blocks=20_000,
        max_num_seqs=num_slots,
        max_num_batched_tokens=512,
        cost=COST,
        gateway=GatewayConfig(admission=admission),
        client=GroupClientConfig(step_deadline_s=10.0),
    )
    return Plan(cluster=cluster, load=Load(), quiet_s=10.0)


def ask(world: World, shared: list[int], *, max_tokens: int = NUM_OUTPUT) -> Ask:
    """A request with the shared prefix and its own suffix."""
    drawn = world.clients.draw()
    drawn.prompt = shared + [world.rng.randrange(200) for _ in range(NUM_OWN)]
    drawn.max_tokens, drawn.ignore_eos, drawn.salt = max_tokens, True, ""
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("spread_s", [0.0, 2.0])
@pytest.mark.parametrize("num_clients", [64, 100])
def test_no_client_of_a_burst_with_a_shared_prompt_is_refused(
    num_clients: int, spread_s: float
) -> None:
    """A closed loop: each client sends two requests, the second after the first answer."""

    async def script(world: World) -> None:
        await asyncio.sleep(1)
        shared = [world.rng.randrange(200) for _ in range(NUM_SHARED)]

        async def client(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            for _ in range(2):
                await world.clients.ask(ask(world, shared))

        delays = [spread_s * number / num_clients for number in range(num_clients)]
        await asyncio.gather(*map(client, delays))

    result = run(plan(num_slots=128), seed=1, script=script)
    assert result.outcomes == {"done": 2 * num_clients}


def test_what_prompts_share_counts_once_as_soon_as_some_were_routed() -> None:
    """The 40 simultaneous requests have 160 own tokens, and 7,840 with the shared ones."""

    async def script(world: World) -> None:
        await asyncio.sleep(1)
        shared = [world.rng.randrange(200) for _ in range(NUM_SHARED)]
        asks = [ask(world, shared) for _ in range(120)]
        for each in asks:
            each.prompt = each.prompt[: NUM_SHARED + 4]

        for first in asks[:80]:
            await world.clients.ask(first)
        await asyncio.gather(*map(world.clients.ask, asks[80:]))

    strict = AdmissionConfig(max_queue_wait_s=1, max_group_wait_s=0.01)
    result = run(plan(num_slots=400, admission=strict), seed=1, script=script)
    assert result.outcomes == {"done": 120}


def test_who_is_refused_finds_room_when_told_to_come_back() -> None:
    """More arrive than can begin within the bound; each of the others is refused once."""
    num_refusals = []

    async def script(world: World) -> None:
        await asyncio.sleep(1)
        shared = [world.rng.randrange(200) for _ in range(NUM_SHARED)]

        async def client() -> None:
            asks = [ask(world, shared, max_tokens=1)]
            await world.clients.ask(asks[0])
            while (error := asks[-1].error) is not None:
                retry_after_s = int(dict(error.trailing_metadata() or ())["retry-after"])
                await asyncio.sleep(retry_after_s)
                asks.append(ask(world, shared, max_tokens=1))
                await world.clients.ask(asks[-1])
            num_refusals.append(len(asks) - 1)

        await asyncio.gather(*(client() for _ in range(400)))

    admission = AdmissionConfig(max_queue_wait_s=5)
    run(plan(num_slots=400, admission=admission), seed=1, script=script)
    assert set(num_refusals) == {0, 1}
