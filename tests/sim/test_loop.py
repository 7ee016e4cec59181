import asyncio

import pytest
from tests.sim.loop import Deadlock, Process, SimLoop, simulate


def test_time_passes_by_itself_and_costs_nothing() -> None:
    async def main(loop: SimLoop) -> float:
        await asyncio.sleep(1e6)
        return loop.time()

    assert simulate(main, seed=1) == 1e6


def test_the_seed_and_nothing_else_chooses_the_order() -> None:
    async def main(_: SimLoop) -> list[int]:
        order: list[int] = []

        async def turn(number: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                order.append(number)

        await asyncio.gather(*(turn(number) for number in range(10)))
        return order

    orders = [simulate(main, seed=seed) for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


def test_a_deadlock_raises_and_names_who_waits() -> None:
    async def never_told(_: SimLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="every task waits") as raised:
        simulate(never_told, seed=1)
    assert "never_told" in "".join(raised.value.__notes__)


def test_what_threads_post_comes_in_order() -> None:
    async def main(loop: SimLoop) -> list[int]:
        found: list[int] = []
        for number in range(20):
            loop.call_soon_threadsafe(found.append, number)
        await asyncio.sleep(1)
        return found

    assert simulate(main, seed=1) == list(range(20))


def test_a_frozen_process_does_nothing_and_is_late_when_it_goes_on() -> None:
    async def main(loop: SimLoop) -> list[float]:
        process, ticks = Process(loop, "p"), []

        async def tick() -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                ticks.append(loop.time())

        async def begin() -> None:  # A task's tasks belong to its process too.
            await asyncio.create_task(tick())

        task = process.spawn(begin())
        await asyncio.sleep(1.5)
        process.freeze()
        await asyncio.sleep(10)
        process.thaw()
        await task
        return ticks

    assert simulate(main, seed=1) == [1, 11.5, 12.5]


def test_a_killed_process_leaves_no_task() -> None:
    async def main(loop: SimLoop) -> list[object]:
        process = Process(loop, "p")
        task = process.spawn(asyncio.sleep(100))
        process.freeze()
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(1)
        return [task.cancelled(), process.tasks]

    assert simulate(main, seed=1) == [True, []]
