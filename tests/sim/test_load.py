"""Overload, priorities, deadlines and an empty cluster: the real gateway on the virtual clock."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import quantiles
from typing import Any

import grpc
import pytest
from tests.sim.asks import Ask
from tests.sim.clients import Load
from tests.sim.cluster import ClusterPlan
from tests.sim.faults import ChaosPlan
from tests.sim.model import StepCost
from tests.sim.world import Plan, Script, World, run

from quire.cluster.admission import AdmissionConfig
from quire.cluster.completion import CompletionConfig
from quire.cluster.gateway_service import GatewayConfig
from quire.cluster.group_client import GroupClientConfig

COST = StepCost(step_s=0.05, token_s=0.001)
MEAN_OUTPUT = 20
NUM_SLOTS = 8
WARM_UP_S, LENGTH_S = 5.0, 25.0
LATENCY_S = 0.02
"""A client's way to a gateway and back, at most."""


def cluster(*, num_gateways: int = 1, **changes: Any) -> ClusterPlan:
    gateway = GatewayConfig(
        completion=CompletionConfig(group_wait_s=60.0),
        admission=AdmissionConfig(num_gateways=num_gateways),
    )
    plan = ClusterPlan(
        num_groups=2,
        num_gateways=num_gateways,
        num_blocks=2000,
        max_num_seqs=NUM_SLOTS,
        cost=COST,
        gateway=gateway,
        client=GroupClientConfig(step_deadline_s=10.0),
    )
    return replace(plan, **changes)


async def come(world: World, *, per_s: float, until_s: float, priority: int = 0) -> list[Ask]:
    """Requests as the load draws them, at random times; returns them once the last has come."""
    asks = []
    while world.loop.time() < until_s:
        await asyncio.sleep(world.rng.expovariate(per_s))
        asks.append(replace(world.clients.draw(), priority=priority))
        world.clients.ask(asks[-1])
    return asks


def play(script: Script, *, plan: ClusterPlan | None = None) -> None:
    load = Load(mean_output=MEAN_OUTPUT, num_documents=20)
    run(Plan(cluster=plan or cluster(), load=load, quiet_s=20.0), seed=1, script=script)


def p99_ttft_s(asks: Sequence[Ask]) -> float:
    return quantiles([ask.ttft_s for ask in asks if ask.outcome == "done"], n=100)[98]


@cache
def loaded(per_s: float, *, num_gateways: int = 1) -> list[Ask]:
    """What became of those that came at such a rate, after a warm-up at a third of it."""
    asks: list[Ask] = []

    async def script(world: World) -> None:
        await asyncio.sleep(1)
        await come(world, per_s=per_s / 3, until_s=WARM_UP_S)
        asks.extend(await come(world, per_s=per_s, until_s=WARM_UP_S + LENGTH_S))

    play(script, plan=cluster(num_gateways=num_gateways))
    return asks


def done_per_s(asks: Sequence[Ask]) -> float:
    """In the last three quarters of the time in which they came."""
    begin_s, end_s = WARM_UP_S + LENGTH_S / 4, WARM_UP_S + LENGTH_S
    ends = [ask.end_s for ask in asks if ask.outcome == "done" and ask.end_s is not None]
    return sum(begin_s < at_s <= end_s for at_s in ends) / (end_s - begin_s)


@cache
def capacity_per_s() -> float:
    """What two groups end when there is always more to do."""
    return done_per_s(loaded(30.0))


@pytest.mark.parametrize("num_gateways", [1, 3])
def test_at_three_times_its_capacity_a_cluster_serves_what_it_took_as_if_at_capacity(
    num_gateways: int,
) -> None:
    at_capacity = loaded(capacity_per_s())
    over = loaded(3 * capacity_per_s(), num_gateways=num_gateways)
    assert p99_ttft_s(over) <= 2 * p99_ttft_s(at_capacity)
    assert done_per_s(over) > 0.9 * capacity_per_s(), "groups do not fall idle"
    refused = [ask for ask in over if ask.is_refused]
    assert len(refused) + sum(ask.outcome == "done" for ask in over) == len(over)
    for ask in refused:
        assert ask.end_s is not None
        assert ask.end_s - ask.begin_s <= LATENCY_S
        assert ask.num_tokens == 0
