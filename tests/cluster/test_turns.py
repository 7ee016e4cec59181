"""Calls begin a few at a time, in turn of their tenants."""

import asyncio

import pytest

from quire.cluster.serving.bounds import Turns

pytestmark = pytest.mark.anyio


class _Calls:
    def __init__(self) -> None:
        self.turns = Turns()
        self.began: list[str] = []

    def come(self, tenant: str, number: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._call(tenant)) for _ in range(number)]

    async def _call(self, tenant: str) -> None:
        await self.turns.take(tenant)
        self.began.append(tenant)


async def test_a_burst_begins_a_few_calls_in_each_turn_of_the_event_loop() -> None:
    calls, most = _Calls(), 0
    tasks = calls.come("heavy", 50)
    while len(calls.began) < 50:
        before = len(calls.began)
        await asyncio.sleep(0)
        most = max(most, len(calls.began) - before)
    await asyncio.gather(*tasks)
    assert most == 2


async def test_a_tenants_call_does_not_wait_behind_anothers_burst() -> None:
    calls = _Calls()
    tasks = calls.come("heavy", 50)
    await asyncio.sleep(0)
    tasks += calls.come("light", 1)
    await asyncio.gather(*tasks)
    assert "light" in calls.began[:8]


async def test_a_call_that_is_cancelled_takes_no_turn() -> None:
    calls = _Calls()
    tasks = calls.come("heavy", 50)
    await asyncio.sleep(0)
    for each in tasks[2:-1]:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(calls.began) == 3
    for _ in range(3):
        await asyncio.sleep(0)
    tasks = calls.come("heavy", 2)
    await asyncio.sleep(0)
    assert len(calls.began) == 5
    await asyncio.gather(*tasks)
