"""`Budget` never exceeds its limit, gives each tenant its share and turn, and loses nothing."""

import asyncio
import random

import pytest

from quire.cluster.errors import Overloaded
from quire.cluster.serving.bounds import Budget, Hold, Inflight, Shares

pytestmark = pytest.mark.anyio


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_than_the_limit_is_held_and_what_came_first_is_served_first() -> None:
    budget = Budget(10)
    served: list[int] = []
    holds: dict[int, Hold] = {}

    async def take(number: int, num_bytes: int) -> None:
        holds[number] = await budget.take(num_bytes)
        served.append(number)

    tasks = [asyncio.create_task(take(n, size)) for n, size in enumerate((6, 6, 1, 100, 2))]
    await settle()
    assert (served, budget.held, budget.waiting) == ([0], 6, 6 + 1 + 10 + 2)  # 1 does not overtake.
    assert budget.take_now(1) is None
    holds[0].release()
    await settle()
    assert (served, budget.held) == ([0, 1, 2], 7)
    holds[1].release()
    holds[2].release()
    holds[2].release()  # Once only.
    await settle()
    assert (served, budget.held) == ([0, 1, 2, 3], 10)
    holds[3].release()
    await asyncio.gather(*tasks)
    assert (budget.held, budget.waiting) == (2, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_however_those_who_wait_are_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    budget = Budget(10)

    async def use() -> None:
        with await budget.take(rng.randint(1, 12), rng.choice(["", "a", "b"])):
            assert budget.held <= budget.limit
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        tasks.append(asyncio.create_task(use()))
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (budget.held, budget.waiting) == (0, 0)
    assert budget.take_now(10) is not None


def test_a_tenant_takes_as_much_as_it_leaves_free() -> None:
    shares = Shares(32)
    assert [shares.take(8, "a") for _ in range(4)] == [True, True, False, False]
    assert [shares.take(4, "b") for _ in range(3)] == [True, True, False]
    assert [shares.take(1, "c") for _ in range(5)] == [True, True, True, True, False]
    assert shares.held == 16 + 8 + 4
    shares.give_back(16, "a")
    assert shares.take(4, "b")


def test_without_tenants_everything_may_be_taken() -> None:
    shares = Shares(32)
    assert [shares.take(8, "") for _ in range(5)] == [True, True, True, True, False]


async def test_tenants_take_turns_at_a_single_place() -> None:
    budget = Budget(1)
    served: list[str] = []

    async def use(tenant: str) -> None:
        with await budget.take(1, tenant):
            served.append(tenant)
            await asyncio.sleep(0)

    tenants = ["greedy"] * 50 + ["b", "b", "c"]
    await asyncio.gather(*(use(tenant) for tenant in tenants))
    assert sorted(served[:7]) == ["b", "b", "c", *["greedy"] * 4]
    assert sorted(served) == sorted(tenants)


async def test_large_requests_are_not_overtaken_for_ever_by_small_ones_of_others() -> None:
    budget = Budget(10)
    first = await budget.take(4, "small")
    large = asyncio.create_task(budget.take(8, "large"))
    await settle()
    assert budget.take_now(2, "third") is None
    first.release()
    (await large).release()
    assert budget.held == 0


def test_a_tenant_leaves_places_for_others_where_nobody_waits() -> None:
    refusals: list[None] = []
    inflight = Inflight(8, "{num} of {limit}", refused=lambda: refusals.append(None))
    places = [inflight.entered(tenant="greedy") for _ in range(4)]
    with pytest.raises(Overloaded, match="4 of 8"):
        inflight.entered(tenant="greedy")
    with inflight.entered(tenant="other"):
        assert (inflight.num, len(refusals)) == (5, 1)
    for place in places:
        place.release()
    assert inflight.num == 0
