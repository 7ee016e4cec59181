"""The request router, called as Serve does, without a cluster and with fake replicas."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RunningReplica

from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId
from quire.router.registry import REGISTRY, Member
from quire.router.serve_router import PrefixAwareRouter
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import BlockHashes, as_token_ids, hash_blocks, root_hash

DEPLOYMENT = DeploymentID(name="Group", app_name="test")
POOL = "test-serve-router"
BLOCK_SIZE = 4


@dataclass
class FakeReplica:
    """The part of a RunningReplica that routing uses."""

    name: str
    replica_metadata: dict[str, object] = field(default_factory=dict)
    max_ongoing_requests: int = 100
    num_ongoing: int = 0

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(unique_id=self.name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_ongoing


def hash_prompt(token_ids: Sequence[int], cache_salt: str) -> BlockHashes:
    root = root_hash(
        model_fingerprint="m", kv_dtype="float32", block_size=BLOCK_SIZE, cache_salt=cache_salt
    )
    return hash_blocks(as_token_ids(token_ids), block_size=BLOCK_SIZE, root=root)


@pytest.fixture
def table() -> Iterator[RoutingTable]:
    table = RoutingTable(block_size=BLOCK_SIZE)
    detach = REGISTRY.attach(POOL, table, hash_prompt=hash_prompt)
    yield table
    detach()
    REGISTRY.publish(POOL, [])


def new_router(*replicas: FakeReplica) -> PrefixAwareRouter:
    """A router, made in a running loop from the class pickled by value, as Serve ships it."""
    settings: dict[str, Any] = {
        "request_router_class": "quire.router.serve_router:PrefixAwareRouter",
        "request_router_kwargs": {"pool": POOL},
    }
    config = RequestRouterConfig(**settings)
    router = cast(Callable[..., PrefixAwareRouter], config.get_request_router_class())(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(**config.request_router_kwargs)
    router.update_replicas(cast(list[RunningReplica], list(replicas)))
    return router


def call(request_id: str, *args: object, client_id: str = "", **kwargs: object) -> PendingRequest:
    metadata = RequestMetadata(request_id=client_id, internal_request_id=request_id)
    return PendingRequest(args=list(args), kwargs=kwargs, metadata=metadata)


async def ranks(router: PrefixAwareRouter, request: PendingRequest) -> list[list[str]]:
    replicas = list(router.curr_replicas.values())
    chosen = await router.choose_replicas(replicas, request)
    return [[replica.replica_id.unique_id for replica in rank] for rank in chosen]


def test_serves_membership_is_published_with_what_replicas_said_of_themselves() -> None:
    async def scenario() -> None:
        a = FakeReplica("a", {"address": "127.0.0.1:1"})
        b = FakeReplica("b", {"address": "127.0.0.1:2"})
        router = new_router(a, b)
        assert REGISTRY.members(POOL) == (
            Member(GroupId("a"), {"address": "127.0.0.1:1"}),
            Member(GroupId("b"), {"address": "127.0.0.1:2"}),
        )
        router.on_replica_actor_died(a.replica_id)
        assert [m.group for m in REGISTRY.members(POOL)] == ["b"]
        router.update_replicas([])
        assert REGISTRY.members(POOL) == ()

    asyncio.run(scenario())


def test_a_call_with_token_ids_goes_where_its_prefix_is(table: RoutingTable) -> None:
    async def scenario() -> None:
        router = new_router(*(FakeReplica(name) for name in "abcd"))
        table.update_members(member.group for member in REGISTRY.members(POOL))
        prompt = list(range(1000))
        first, second = await ranks(router, call("1", token_ids=prompt))
        assert len(first) == 1
        assert len(second) == 2
        assert first[0] not in second
        for i in range(2, 6):
            again, _ = await ranks(router, call(str(i), {"token_ids": [*prompt, i]}))
            assert again == first
        salted = [
            (await ranks(router, call(f"s{i}", token_ids=prompt, cache_salt=f"tenant {i}")))[0][0]
            for i in range(20)
        ]
        assert len(Counter(salted)) == 4
        assert table.stats().num_in_flight == 25
        for request_id in [*map(str, range(1, 6)), *(f"s{i}" for i in range(20))]:
            router.on_request_completed(FakeReplica("a").replica_id, request_id)
        assert table.stats().num_in_flight == 0

    asyncio.run(scenario())


def test_only_candidates_are_chosen(table: RoutingTable) -> None:
    async def scenario() -> None:
        router = new_router(FakeReplica("a"))
        table.update_members([GroupId("a"), GroupId("b")])
        for i in range(10):
            assert await ranks(router, call(str(i), token_ids=[i] * 20)) == [["a"], []]
        table.update_members([GroupId("b")])
        assert await ranks(router, call("x", token_ids=[1] * 20)) == [[], ["a"]]

    asyncio.run(scenario())


def test_the_load_of_frames_and_what_was_sent_since_count_for_calls_too(
    table: RoutingTable,
) -> None:
    async def scenario() -> None:
        router = new_router(FakeReplica("a"), FakeReplica("b"))
        table.update_members(member.group for member in REGISTRY.members(POOL))
        for name, pending in (("a", 5_000), ("b", 0)):
            load = GroupLoad(
                num_running=0,
                num_waiting=0,
                num_pending_prefill_tokens=pending,
                num_available_blocks=1000,
            )
            table.update_load(GroupId(name), load)
        # The frames show a's queue; what is sent to b fills it up, call by call.
        chosen = [
            (await ranks(router, call(str(i), token_ids=[1000 + i] * 1000)))[0][0]
            for i in range(10)
        ]
        assert chosen[:5] == ["b"] * 5
        assert "a" in chosen[5:]
        loads = {state.group: state.num_queued_tokens for state in table.states()}
        assert loads[GroupId("a")] + loads[GroupId("b")] == 15_000

    asyncio.run(scenario())


def test_calls_are_explained_by_the_id_that_serve_gives_them(table: RoutingTable) -> None:
    async def scenario() -> None:
        router = new_router(FakeReplica("a"), FakeReplica("b"))
        table.update_members(member.group for member in REGISTRY.members(POOL))
        request = call("internal", token_ids=[1] * 40, client_id="serve's id")
        (first, second) = await ranks(router, request)
        (found,) = table.explain("serve's id")
        assert found.request_id == "serve:internal"
        assert found.decision.group == first[0]
        assert [c.num_prefill_tokens for c in found.decision.candidates] == [40, 40]
        # Its queue is full: Serve asks again and then takes another one.
        await ranks(router, request)
        router.on_request_completed(FakeReplica(second[0]).replica_id, "internal")
        outcomes = [each.outcome for each in table.explain("serve:internal")]
        assert outcomes == ["moved: Serve asks again", f"ended on {second[0]}"]

    asyncio.run(scenario())


class Unreadable:
    """An object that numpy cannot read, like a tensor that requires a gradient."""

    def __array__(self, *arguments: object, **options: object) -> object:
        raise RuntimeError("not like that")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("text",),
        ({"prompt": "text"},),
        (None,),
        ({"token_ids": "text"},),
        ({"token_ids": [-1, 2**40]},),
        ({"token_ids": 7},),
        ({"token_ids": Unreadable()},),
    ],
)
def test_a_call_without_usable_token_ids_goes_to_the_shorter_of_two_queues(
    arguments: tuple[Any, ...], table: RoutingTable
) -> None:
    async def scenario() -> None:
        router = new_router(*(FakeReplica(name) for name in "abc"))
        table.update_members(member.group for member in REGISTRY.members(POOL))
        pairs = set()
        for i in range(50):
            first, second = await ranks(router, call(str(i), *arguments))
            assert first == []
            pairs.add(frozenset(second))
        assert pairs == {frozenset("ab"), frozenset("ac"), frozenset("bc")}
        assert table.stats().num_in_flight == 0

    asyncio.run(scenario())


def test_without_a_gateway_calls_are_still_routed() -> None:
    async def scenario() -> None:
        router = new_router(FakeReplica("a"))
        assert await ranks(router, call("1", token_ids=[1, 2, 3])) == [[], ["a"]]
        router.on_request_completed(FakeReplica("a").replica_id, "1")

    asyncio.run(scenario())


def test_what_a_cancelled_call_would_have_left_is_not_counted_for_ever() -> None:
    now_s = 0.0
    table = RoutingTable(block_size=BLOCK_SIZE, clock=lambda: now_s)
    detach = REGISTRY.attach(POOL, table, hash_prompt=hash_prompt)

    async def scenario() -> None:
        nonlocal now_s
        router = new_router(FakeReplica("a"))
        table.update_members([GroupId("a")])
        for name in ("cancelled", "long"):
            await ranks(router, call(name, token_ids=[1] * 400))
        load = GroupLoad(
            num_running=1, num_waiting=0, num_pending_prefill_tokens=0, num_available_blocks=9
        )
        for _ in range(3):
            table.update_load(GroupId("a"), load)
        now_s = 50.0
        table.expire()
        assert table.stats().num_in_flight == 2
        now_s = 61.0
        table.expire()
        stats = table.stats()
        assert (stats.num_in_flight, stats.num_in_flight_blocks) == (0, 0)
        # That one was only slow, and is reported as usual.
        router.on_request_completed(FakeReplica("a").replica_id, "long")
        (found,) = table.explain("serve:long")
        assert found.outcome == "ended on a"

    asyncio.run(scenario())
    detach()


def test_serve_backs_off_when_every_queue_is_full(table: RoutingTable) -> None:
    async def scenario() -> None:
        router = new_router(FakeReplica("a"))
        request = call("1", token_ids=[1])
        await ranks(router, request)
        assert request.routing_context.should_backoff

    asyncio.run(scenario())


def test_what_keeps_a_call_from_being_routed_is_logged_once(
    table: RoutingTable, caplog: pytest.LogCaptureFixture
) -> None:
    def failures() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "failed" in record.message]

    async def scenario() -> None:
        router = new_router(FakeReplica("a"))
        assert await ranks(router, call("no group", token_ids=[1, 2])) == [[], ["a"]]
        assert not failures(), "that there is no group"
        for number in range(3):
            assert await ranks(router, call(str(number), token_ids=["odd"])) == [[], ["a"]]

    asyncio.run(scenario())
    (record,) = failures()
    assert "routing a call by its prefix failed" in record.message
    assert record.exc_info is not None
