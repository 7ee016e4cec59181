import asyncio

import pytest

from quire.cluster.links.group_stream import Turns

pytestmark = pytest.mark.anyio


async def test_a_turn_takes_a_few_in_order_and_lets_others_in_between() -> None:
    turns = Turns(per_turn=2)
    happened: list[object] = []
    for number in range(5):
        turns.soon(lambda number=number: happened.append(number))  # type: ignore[misc]
    assert not happened
    for _ in range(4):
        await asyncio.sleep(0)  # One turn of the loop.
        happened.append("turn")
    assert happened == [0, 1, "turn", 2, 3, "turn", 4, "turn", "turn"]


async def test_what_comes_from_within_a_turn_has_a_later_one() -> None:
    turns = Turns(per_turn=2)
    happened: list[str] = []

    def first() -> None:
        happened.append("first")
        turns.soon(lambda: happened.append("next"))

    turns.soon(first)
    await asyncio.sleep(0)
    assert happened == ["first"]
    await asyncio.sleep(0)
    assert happened == ["first", "next"]
