"""`ByteBudget` never exceeds its limit, serves in order of arrival, and loses nothing."""

import asyncio
import random

import pytest

from quire.cluster.serving.bounds import ByteBudget, Hold

pytestmark = pytest.mark.anyio


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_than_the_limit_is_held_and_what_came_first_is_served_first() -> None:
    budget = ByteBudget(10)
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
    budget = ByteBudget(10)

    async def use() -> None:
        with await budget.take(rng.randint(1, 12)):
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
