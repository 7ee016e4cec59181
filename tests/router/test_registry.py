"""The registry passes members to subscribers in order on the subscriber's loop, from any thread."""

import asyncio
import threading
from collections.abc import Sequence

from quire.router.prefix_index.directory import GroupId
from quire.router.registry import Member, Registry
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import BlockHash


def member(name: str, **metadata: object) -> Member:
    return Member(GroupId(name), metadata)


def hash_nothing(token_ids: Sequence[int], cache_salt: str) -> list[BlockHash]:
    return []


def test_a_subscriber_hears_who_runs_and_each_change_in_order_on_its_own_thread() -> None:
    registry = Registry()
    heard: list[tuple[int, tuple[Member, ...]]] = []

    async def gateway() -> None:
        registry.subscribe("pool", lambda now: heard.append((threading.get_ident(), now)))
        router = threading.Thread(target=publish_all)
        router.start()
        while len(heard) < 21:
            await asyncio.sleep(0.001)
        router.join()

    def publish_all() -> None:
        for i in range(20):
            registry.publish("pool", [member("b", n=i), member("a")])
            registry.publish("pool", [member("a"), member("b", n=i)])

    asyncio.run(gateway())
    assert {thread for thread, _ in heard} == {threading.get_ident()}
    assert heard[0][1] == ()
    assert [now for _, now in heard[1:]] == [(member("a"), member("b", n=i)) for i in range(20)]


def test_a_late_subscriber_is_told_who_runs() -> None:
    registry = Registry()
    registry.publish("pool", [member("a")])
    registry.publish("other", [member("z")])
    heard: list[tuple[Member, ...]] = []

    async def gateway() -> None:
        stop = registry.subscribe("pool", heard.append)
        await asyncio.sleep(0)
        stop()
        registry.publish("pool", [])
        await asyncio.sleep(0)

    asyncio.run(gateway())
    assert heard == [(member("a"),)]
    assert registry.members("pool") == ()


def test_a_gateway_that_is_gone_does_not_stop_the_router() -> None:
    registry = Registry()

    async def gateway() -> None:
        registry.subscribe("pool", lambda now: None)

    asyncio.run(gateway())
    registry.publish("pool", [member("a")])
    assert registry.members("pool") == (member("a"),)


def test_detaching_leaves_a_table_that_came_later_in_place() -> None:
    registry = Registry()
    first, second = RoutingTable(block_size=16), RoutingTable(block_size=16)
    detach_first = registry.attach("pool", first, hash_prompt=hash_nothing)
    detach_second = registry.attach("pool", second, hash_prompt=hash_nothing)
    detach_first()
    assert registry.routing("pool") == (second, hash_nothing)
    detach_second()
    assert registry.routing("pool") is None
