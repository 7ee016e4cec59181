"""The `Admin` service: operators see the groups, and take one out of service and back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status
from tests.cluster.group_calls import submit

from quire.cluster.cli.main import main
from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.group.session import Door, GatewaySession
from quire.v1 import admin_pb2 as pb
from quire.v1 import admin_pb2_grpc, group_pb2
from quire.v1 import inference_pb2 as inference_pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))


@contextlib.asynccontextmanager
async def admin_of(cluster: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def generate(cluster: Any, *, seed: int = 5, max_tokens: int = 8) -> Any:
    params = inference_pb.SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return cluster.inference.Generate(
        inference_pb.GenerateRequest(token_ids=inference_pb.TokenIds(ids=PROMPT), sampling=params)
    )


async def group_of(call: Any) -> str:
    """Reads the call to its end; returns the group that served it."""
    chunks = [chunk async for chunk in call]
    return str(chunks[0].start.routing.group)


async def states(admin: Any) -> dict[str, int]:
    answer = await admin.ListGroups(pb.ListGroupsRequest())
    return {group.id: group.state for group in answer.groups}


async def drain_idle(admin: Any, group: str) -> None:
    drain = admin.Drain(pb.DrainRequest(group=group))
    assert [response.num_requests async for response in drain] == [0]


async def test_groups_are_listed_with_their_load(start_cluster: Any) -> None:
    async with start_cluster() as cluster, admin_of(cluster) as admin:
        cluster.take_steps_of(0.02)
        call = generate(cluster, max_tokens=300)
        serving = (await anext(aiter(call))).start.routing.group
        found: dict[str, Any] = {}
        while not found or not found[serving].num_running:
            answer = await admin.ListGroups(pb.ListGroupsRequest())
            found = {group.id: group for group in answer.groups}
        cluster.take_steps_of(0)
        call.cancel()
    assert list(found) == ["g0", "g1"]
    for name, group in found.items():
        assert group.address == cluster.groups[name].address
        assert group.state == pb.Group.SERVING
        assert group.model == "hash"
        assert group.num_blocks == 200
        assert group.num_requests == group.num_running == (name == serving)
        assert group.num_free_blocks + group.num_cached_blocks <= 200 - (name == serving)


async def test_a_drained_group_ends_what_it_runs_and_gets_nothing_new(start_cluster: Any) -> None:
    async with start_cluster() as cluster, admin_of(cluster) as admin:
        cluster.take_steps_of(0.1)
        call = generate(cluster, max_tokens=60)
        chunks = [await anext(aiter(call))]
        draining = chunks[0].start.routing.group
        drain = aiter(admin.Drain(pb.DrainRequest(group=draining)))
        assert (await anext(drain)).num_requests == 1
        assert (await states(admin))[draining] == pb.Group.DRAINING
        cluster.take_steps_of(0)
        chunks += [chunk async for chunk in call]
        assert [response.num_requests async for response in drain] == [0]
        # Its cached prefix would have attracted them.
        others = {await group_of(generate(cluster, seed=seed)) for seed in range(4)}
        assert cluster.gateway.telemetry.handovers._value.get() == 0
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == cluster.model.continuation(PROMPT, seed=5, max_tokens=60)
    assert {chunk.start.routing.group for chunk in chunks if chunk.HasField("start")} == {draining}
    assert others == {"g0", "g1"} - {draining}


async def test_a_group_takes_requests_again_and_is_known_by_its_cache(start_cluster: Any) -> None:
    async with start_cluster() as cluster, admin_of(cluster) as admin:
        home = await group_of(generate(cluster))
        await drain_idle(admin, home)
        (other,) = {"g0", "g1"} - {home}
        await admin.Undrain(pb.UndrainRequest(group=home))
        assert set((await states(admin)).values()) == {pb.Group.SERVING}
        await drain_idle(admin, other)
        while not cluster.table._directory.num_blocks(home):
            await asyncio.sleep(0.01)
        chunks = [chunk async for chunk in generate(cluster)]
    assert chunks[0].start.routing.group == home
    assert chunks[0].start.num_cached_tokens > 0


async def test_without_a_group_requests_wait_for_one_to_come_back(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, group_wait_s=60) as cluster, admin_of(cluster) as admin:
        await drain_idle(admin, "g0")
        assert not cluster.models.is_ready
        assert cluster.connections.troubles() == [f"{cluster.groups['g0'].address}: draining"]
        waiting = asyncio.create_task(group_of(generate(cluster)))
        while not cluster.connections.demand.num_requests:
            await asyncio.sleep(0.01)
        await admin.Undrain(pb.UndrainRequest(group="g0"))
        assert await waiting == "g0"


async def test_who_drains_is_told_when_another_takes_it_back(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, admin_of(cluster) as admin:
        cluster.take_steps_of(0.05)
        call = generate(cluster, max_tokens=300)
        await anext(aiter(call))
        drain = admin.Drain(pb.DrainRequest(group="g0"))
        assert (await drain.read()).num_requests == 1
        await admin.Undrain(pb.UndrainRequest(group="g0"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain.read()
        cluster.take_steps_of(0)
        call.cancel()
    assert raised.value.code() == grpc.StatusCode.ABORTED


async def test_a_group_that_stops_cannot_be_taken_back(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cluster.edge.admin_grpc._UNDRAIN_TIMEOUT_S", 0.2)
    async with start_cluster() as cluster, admin_of(cluster) as admin:
        cluster.take_steps_of(0.05)
        call = generate(cluster, max_tokens=300)
        name = (await anext(aiter(call))).start.routing.group
        stop = asyncio.create_task(cluster.groups[name].service.drain(timeout_s=60))
        while (await states(admin))[name] == pb.Group.SERVING:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.Undrain(pb.UndrainRequest(group=name))
        cluster.take_steps_of(0)
        call.cancel()
        await stop
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_of_two_models_the_one_that_serves_is_not_displaced(
    start_cluster: Any, start_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cluster.edge.admin_grpc._UNDRAIN_TIMEOUT_S", 0.2)
    async with (
        start_cluster(num_groups=1) as cluster,
        start_group("new", description={"model_fingerprint": "hash-2"}) as new,
        admin_of(cluster) as admin,
    ):
        await drain_idle(admin, "g0")
        cluster.connections.set_addresses([cluster.groups["g0"].address, new.address])
        await cluster.wait_ready(1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.Undrain(pb.UndrainRequest(group="g0"))
        assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert await group_of(generate(cluster)) == "new"
        await drain_idle(admin, "new")
        await cluster.wait_ready(1)
        assert await group_of(generate(cluster)) == "g0"


async def test_who_was_turned_away_hears_of_the_drain_before_its_end(start_group: Any) -> None:
    async with start_group() as group:
        door = Door(phase=group_pb2.StepFrame.DRAINING)
        attachment = GatewaySession(group.engine_loop, door, name="gateway")

        async def commands() -> AsyncIterator[group_pb2.GroupCommand]:
            yield submit("r", PROMPT)

        await attachment.read(commands())
        door.phase = group_pb2.StepFrame.SERVING
        first, second = attachment.take_frame(), attachment.take_frame()
        attachment.close()
    assert first.deltas[0].error.code == group_pb2.GroupError.DRAINING
    assert first.phase == group_pb2.StepFrame.DRAINING
    assert second.phase == group_pb2.StepFrame.SERVING


async def test_the_command_line_lists_drains_and_puts_back(
    start_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_cluster() as cluster:
        flags = ["--address", cluster.grpc_address]

        async def quire(*arguments: str) -> tuple[int, str, str]:
            status = await asyncio.to_thread(main, ["admin", *arguments, *flags])
            return status, *capsys.readouterr()

        assert await quire("drain", "g1") == (0, "g1 drains: 0 requests\n", "")
        status, listed, _ = await quire("list")
        assert await quire("undrain", "g1") == (0, "g1 takes requests again\n", "")
        assert cluster.connections.num_ready == 2
        refused = await quire("drain", "g2")
        address = cluster.groups["g1"].address
    assert status == 0
    head, first, second = (line.split() for line in listed.splitlines())
    assert head[:3] == ["group", "address", "state"]
    assert first[0] == "g0"
    assert second == ["g1", address, "draining", "hash", "0", "0", "0", "200", "of", "200"]
    assert refused[0] == 1
    assert "NOT_FOUND: group='g2' is not attached; attached are: g0, g1" in refused[2]


async def test_groups_that_are_not_there_are_named(start_cluster: Any) -> None:
    async with start_cluster() as cluster, admin_of(cluster) as admin:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.Drain(pb.DrainRequest(group="g7")).read()
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
        assert "g0, g1" in (raised.value.details() or "")
        status = rpc_status.from_call(raised.value)
        assert status is not None
        assert b"GROUP_NOT_FOUND" in status.details[0].value
        cluster.take_steps_of(0.05)
        call = generate(cluster, max_tokens=300)
        name = (await anext(aiter(call))).start.routing.group
        drain = admin.Drain(pb.DrainRequest(group=name))
        await drain.read()
        await cluster.groups[name].kill()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain.read()
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        answer = await admin.ListGroups(pb.ListGroupsRequest())
        (gone,) = [group for group in answer.groups if group.state == pb.Group.UNREACHABLE]
        cluster.take_steps_of(0)
        call.cancel()
    assert gone.address == cluster.groups[name].address
    assert gone.trouble


async def test_only_an_operators_key_is_let_in(start_cluster: Any) -> None:
    keys = ApiKeys({"mine": Caller(tenant="a"), "boss": Caller(tenant="b", is_operator=True)})
    async with start_cluster(num_groups=1, keys=keys) as cluster, admin_of(cluster) as admin:

        async def code(key: str) -> grpc.StatusCode:
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            call = admin.ListGroups(pb.ListGroupsRequest(), metadata=metadata)
            return await call.code()  # type: ignore[no-any-return]

        assert await code("") == grpc.StatusCode.UNAUTHENTICATED
        assert await code("mine") == grpc.StatusCode.PERMISSION_DENIED
        assert await code("boss") == grpc.StatusCode.OK
        drain = admin.Drain(
            pb.DrainRequest(group="g0"), metadata=(("authorization", "Bearer mine"),)
        )
        assert await drain.code() == grpc.StatusCode.PERMISSION_DENIED
        assert cluster.connections.num_ready == 1
