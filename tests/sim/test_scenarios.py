"""Single faults, with bounds on a client's wait for its next token."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from tests.sim.asks import Ask
from tests.sim.clients import Load
from tests.sim.cluster import ClusterPlan
from tests.sim.faults import ChaosPlan, Fault
from tests.sim.model import POISON, StepCost
from tests.sim.world import Plan, Result, World, run

from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.links.group_client import GroupClientConfig

CLIENT = GroupClientConfig(silence_timeout_s=2.0, step_deadline_s=5.0)
COST = StepCost(step_s=0.02, token_s=0.0005)
CLUSTER = ClusterPlan(num_groups=2, num_blocks=2000, max_num_seqs=64, client=CLIENT, cost=COST)
NUM_STREAMS = 30
NUM_TOKENS = 100
PROMPT = list(range(50))

# The time for a group to recompute the streams of another one, in turn with its own decodes.
RECOMPUTE_S = NUM_STREAMS * COST(len(PROMPT) + NUM_TOKENS) + 1.0

Step = Callable[[World], Awaitable[None]]


def ask(
    world: World, *, num_tokens: int = NUM_TOKENS, prompt: list[int] = PROMPT, **changes: Any
) -> Ask:
    number = len(world.clients.asks)
    one = replace(
        world.clients.draw(),
        prompt=[*prompt, number % 200],
        max_tokens=num_tokens,
        ignore_eos=True,
        salt="",
        cancel_at=None,
        **changes,
    )
    world.clients.ask(one)
    return one


def play(step: Step, *, plan: Plan | None = None, seed: int = 1, warm_s: float = 1.0) -> Result:
    """Begins streams, then runs ``step``. Leftovers are checked as in every run."""

    async def script(world: World) -> None:
        await asyncio.sleep(1)
        for _ in range(NUM_STREAMS):
            ask(world)
        await asyncio.sleep(warm_s)
        await step(world)

    return run(plan or Plan(cluster=CLUSTER), seed=seed, script=script)


def fault(kind: str, *, length_s: float = 30.0) -> Step:
    async def step(world: World) -> None:
        world.chaos.begin(kind, group=world.cluster.groups[0], length_s=length_s)
        await asyncio.sleep(length_s)

    return step


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize(
    ("kind", "bound_s"),
    [
        ("crash", 1.0),
        ("rank failure", 1.0),
        ("reset", 1.0),
        ("drain", 1.0),
        ("vanish", CLIENT.silence_timeout_s + 1.0),
        ("freeze", CLIENT.silence_timeout_s + 1.0),
        ("partition", CLIENT.silence_timeout_s + 1.0),
        ("half partition", CLIENT.silence_timeout_s + 1.0),
        ("hang", CLIENT.step_deadline_s + 2.0),
    ],
)
def test_every_stream_goes_on_exactly_and_soon(kind: str, bound_s: float) -> None:
    result = play(fault(kind))
    assert result.outcomes == {"done": NUM_STREAMS}
    assert max(one.largest_gap_s for one in result.asks) <= bound_s + RECOMPUTE_S


def test_groups_that_share_no_fate_lose_nothing_when_each_is_rolled() -> None:
    async def step(world: World) -> None:
        for group in tuple(world.cluster.groups):
            for _ in range(5):
                ask(world)
            world.chaos.begin("drain", group=group)
            await asyncio.sleep(20)

    result = play(step, plan=Plan(cluster=CLUSTER, chaos=ChaosPlan(drain_s=5.0)))
    assert result.outcomes == {"done": NUM_STREAMS + 10}


@pytest.mark.slow
def test_a_lone_group_that_crashes_is_waited_for() -> None:
    plan = Plan(cluster=replace(CLUSTER, num_groups=1, detect_s=1.0, start_s=2.0, news_s=0.5))
    result = play(fault("crash"), plan=plan)
    assert result.outcomes == {"done": NUM_STREAMS}


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("kind", ["crash", "vanish", "rank failure"])
@pytest.mark.parametrize("seed", range(10))
def test_where_all_groups_die_together_every_stream_is_done_once_they_are_back(
    seed: int, kind: str
) -> None:
    """Groups die within a few steps of each other, before streams have many tokens."""
    rng = random.Random(seed)

    async def step(world: World) -> None:
        for group in tuple(world.cluster.groups):
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.05]))
            world.chaos.begin(kind, group=group)
        await asyncio.sleep(30)

    plan = Plan(cluster=replace(CLUSTER, num_groups=rng.choice([3, 6])))
    result = play(step, plan=plan, seed=seed, warm_s=rng.choice([0.05, 0.1, 0.2]))
    assert result.outcomes == {"done": NUM_STREAMS}


def test_a_gateway_that_dies_breaks_its_own_streams_and_no_other() -> None:
    async def step(world: World) -> None:
        world.chaos.begin("gateway crash")
        await asyncio.sleep(20)

    result = play(step, plan=Plan(cluster=replace(CLUSTER, num_gateways=2)))
    assert set(result.outcomes) == {"done", "error"}
    broken = {one.gateway for one in result.asks if one.error is not None}
    whole = {one.gateway for one in result.asks if one.outcome == "done"}
    assert len(broken) == len(whole) == 1
    assert broken.isdisjoint(whole)


def test_more_requests_than_blocks_all_end() -> None:
    """Each group has blocks for two sequences of full length; thirty run at once."""
    plan = Plan(cluster=replace(CLUSTER, num_groups=1, num_blocks=80))
    assert play(_nothing, plan=plan).outcomes == {"done": NUM_STREAMS}


@pytest.mark.slow
def test_what_is_refused_is_refused_at_once_and_the_rest_is_served() -> None:
    async def step(world: World) -> None:
        for _ in range(10):
            for _ in range(30):
                ask(world)
            await asyncio.sleep(0.5)

    plan = Plan(cluster=replace(CLUSTER, max_num_seqs=8, max_num_waiting=4))
    result = play(step, plan=plan)
    refused = [one for one in result.asks if one.error is not None]
    assert set(result.outcomes) == {"done", "error"}
    for one in refused:
        assert one.error is not None
        assert one.error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert one.end_s is not None
        assert one.end_s - one.begin_s < 0.5
        assert not one.num_tokens


def test_who_leaves_frees_its_blocks_within_a_step() -> None:
    async def step(world: World) -> None:
        for task in tuple(world.clients.running):
            task.cancel()
        latency_s = 2 * world.plan.network.max_latency_s
        await asyncio.sleep(latency_s + 2 * COST(world.plan.cluster.max_num_batched_tokens))
        assert [group.engine.stats().num_held_blocks for group in world.cluster.groups] == [0, 0]

    assert play(step).outcomes == {"running": NUM_STREAMS}


@pytest.mark.parametrize(("resets", "within_s"), [(True, 0.5), (False, 8.0)])
def test_a_gateway_that_is_gone_holds_no_blocks(resets: bool, within_s: float) -> None:
    """Its requests would run for 40 s. Without a reset, groups notice the gateway's silence."""

    async def step(world: World) -> None:
        (gateway,) = world.cluster.gateways
        world.chaos.faults.append(Fault("gateway crash", gateway.place, world.loop.time()))
        world.network.kill(gateway.process, resets=resets)
        await asyncio.sleep(within_s)
        assert [group.engine.stats().num_held_blocks for group in world.cluster.groups] == [0, 0]

    plan = Plan(cluster=replace(CLUSTER, cost=StepCost(step_s=0.4)))
    assert play(step, plan=plan).outcomes == {"error": NUM_STREAMS}


@pytest.mark.slow
def test_a_slow_reader_holds_nobody_up_but_itself() -> None:
    def gaps_s(*, is_slow: bool) -> list[float]:
        async def step(world: World) -> None:
            slow = replace(world.clients.draw(), max_tokens=150, prompt=PROMPT, cancel_at=None)
            slow = replace(slow, ignore_eos=True, pauses_s=5.0 if is_slow else 0.0)
            world.clients.ask(slow)
            await asyncio.sleep(1)

        result = play(step, warm_s=0)
        assert result.outcomes == {"done": NUM_STREAMS + 1}
        return [one.largest_gap_s for one in result.asks[:NUM_STREAMS]]

    assert max(gaps_s(is_slow=True)) <= max(gaps_s(is_slow=False)) + COST.step_s


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("num_answers", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_kills_groups_is_stopped_and_the_others_go_on(
    seed: int, num_answers: int
) -> None:
    async def step(world: World) -> None:
        ask(world, prompt=[POISON], num_answers=num_answers)
        await asyncio.sleep(60)

    num_groups = 3
    plan = Plan(
        cluster=replace(CLUSTER, num_groups=num_groups, detect_s=0.5, start_s=2.0, news_s=0.2)
    )
    result = play(step, plan=plan, seed=seed)
    poison = next(one for one in result.asks if one.is_poison)
    assert poison.error is not None
    assert poison.error.code() == grpc.StatusCode.ABORTED
    assert "quarantined" in (poison.error.details() or "")
    assert result.outcomes == {"done": NUM_STREAMS, "error": 1}
    # Completions may run on all groups at once before the first dies.
    num_at_once = min(num_answers, plan.cluster.num_groups)
    max_deaths = CompletionConfig().max_group_deaths
    assert result.num_replaced <= max_deaths + num_at_once - 1


EVENT_KINDS = ("events lost", "events repeated", "events exchanged", "events forgotten")


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_a_wrong_feed_of_events_costs_no_token_and_is_mended(kind: str) -> None:
    """Answers are checked as they arrive, and the directory at the end."""
    plan = Plan(
        cluster=replace(CLUSTER, num_blocks=150),
        load=Load(rate=1.0, num_documents=3),
        chaos=ChaosPlan(kinds=(kind,)),
        length_s=60.0,
    )
    assert set(run(plan, seed=1).outcomes) == {"done"}


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_directory_is_right_a_heartbeat_after_the_last_wrong_event(seed: int) -> None:
    """All streams have ended, so no later event can reveal the error."""

    async def to_the_end(world: World) -> None:
        while world.clients.running:
            await asyncio.sleep(0.01)

    plan = Plan(
        cluster=replace(CLUSTER, num_gateways=2),
        chaos=ChaosPlan(kinds=EVENT_KINDS),
        quiet_s=1.5,  # A heartbeat, the pause before events are requested again, and latencies.
    )
    assert set(play(to_the_end, plan=plan, seed=seed).outcomes) == {"done"}


async def _nothing(_: World) -> None:
    pass
