import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.cluster.completions import completion_of, parts_of
from tests.prepared import prepared

from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.losses import CompletionConfig, RetryBudget
from quire.cluster.gateway.pipeline import CompletionPipeline
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import group_pb2, group_pb2_grpc
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
NUM_TOKENS = 120
SLOW_S, FAST_S = 0.1, 0.002  # Step times before and after the event of a test.
WAIT_AT_GROUPS = AdmissionConfig(max_group_wait_s=1000, max_queue_wait_s=1000)
"""Lets requests wait at groups; otherwise they would wait at the gateway."""


def generate(cluster: Any, *, max_tokens: int = NUM_TOKENS, **sampling: Any) -> Any:
    params = pb.SamplingParams(seed=5, max_tokens=max_tokens, ignore_eos=True, **sampling)
    ids = pb.TokenIds(ids=PROMPT)
    return cluster.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling=params))


async def read_rest(call: Any, chunks: list[pb.GenerateResponse]) -> list[int]:
    """Reads to the end; returns all tokens, which must follow on from each other."""
    chunks.extend([chunk async for chunk in call])
    found: list[int] = []
    for chunk in chunks:
        assert chunk.token_offset == len(found)
        found.extend(chunk.token_ids)
    return found


async def begin(call: Any, *, num_chunks: int) -> list[pb.GenerateResponse]:
    chunks = aiter(call)
    return [await anext(chunks) for _ in range(num_chunks)]


async def test_a_stream_goes_on_exactly_when_its_group_is_killed(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster, logprobs=0, presence_penalty=0.5, prompt_logprobs=0)
        chunks = await begin(call, num_chunks=5)
        killed = cluster.groups[chunks[0].start.routing.group]
        await killed.kill()
        cluster.take_steps_of(FAST_S)
        found = await read_rest(call, chunks)
        await killed.settle()
        (other,) = [group for group in cluster.groups.values() if group is not killed]
        assert other.executor.num_steps > 0
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)
    assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == found
    scored = [entry.token_id for chunk in chunks for entry in chunk.start.prompt_logprobs]
    assert scored == PROMPT[1:]
    assert chunks[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert chunks[-1].usage.num_output_tokens == NUM_TOKENS
    text = "".join(chunk.text for chunk in chunks)
    assert text == cluster.model.tokenizer.decode(found)


async def test_a_stream_goes_on_exactly_when_a_rank_of_its_group_fails(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=5)
        failing = cluster.groups[chunks[0].start.routing.group]
        failing.executor.fails = True
        cluster.take_steps_of(FAST_S)
        found = await read_rest(call, chunks)
        assert "rank 1 died" in str(await failing.engine_loop.failed)
        await cluster.wait_ready(1)
        assert "rank 1 died" in cluster.connections.troubles()[0]
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


@pytest.mark.slow
async def test_a_silent_group_is_left_and_its_streams_go_on(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        silent = cluster.groups[chunks[0].start.routing.group]
        # Like a stopped process, whose open connections carry nothing.
        silent.service._heartbeat_s = 1e6
        silent.engine_loop._deliver = lambda result: None
        cluster.take_steps_of(FAST_S)
        found = await read_rest(call, chunks)
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_without_another_group_a_stream_ends_unavailable(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, group_wait_s=0.3) as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        await cluster.groups["g0"].kill()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_rest(call, chunks)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "after 1 attempts and" in (raised.value.details() or "")


@pytest.mark.parametrize("how", ["killed", "failed"])
async def test_a_stream_waits_for_its_only_group_to_come_back(
    start_cluster: Any, start_group: Any, how: str
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        if how == "killed":
            await cluster.groups["g0"].kill()
        cluster.groups["g0"].executor.fails = True
        async with start_group("g0") as again:
            cluster.connections.set_addresses([again.address])
            found = await read_rest(call, chunks)
            assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_what_a_former_group_said_does_not_count_against_its_successor(
    start_cluster: Any, start_group: Any
) -> None:
    async with start_cluster(num_groups=1, group_wait_s=30) as cluster:
        former = cluster.groups["g0"]
        former.executor.step_s = SLOW_S
        card = cluster.connections.card
        request = prepared("r", PROMPT, model=card, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
        parts = parts_of(
            cluster.connections,
            cluster.table,
            tokenizer=cluster.model.tokenizer,
            config=CompletionConfig(group_wait_s=30),
        )
        completion = completion_of(request, parts)
        found: list[int] = []
        has_begun, may_go_on = asyncio.Event(), asyncio.Event()

        async def take(chunk: Chunk) -> None:
            found.extend(chunk.token_ids)
            has_begun.set()
            await may_go_on.wait()

        running = asyncio.ensure_future(CompletionPipeline(parts).run(completion, take))
        await has_begun.wait()
        # Nobody reads the stream until the successor arrives.
        former.executor.fails = True
        await former.engine_loop.failed
        async with start_group("g0") as successor:
            cluster.connections.set_addresses([successor.address])
            await cluster.wait_ready(1)
            may_go_on.set()
            await running
            assert cluster.connections.num_ready == 1
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_a_draining_group_gets_no_new_requests_and_ends_those_it_has(
    start_cluster: Any,
) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        draining = cluster.groups[chunks[0].start.routing.group]
        drained = asyncio.create_task(draining.service.drain(timeout_s=60))
        await asyncio.sleep(0)
        for _ in range(3):
            others = await begin(generate(cluster, max_tokens=2), num_chunks=1)
            assert others[0].start.routing.group != draining.name
        assert cluster.connections.num_ready == 1
        cluster.take_steps_of(FAST_S)
        found = await read_rest(call, chunks)
        assert await drained == 0
        assert cluster.gateway.telemetry.resumes._value.get() == 0, "nothing was lost"
        assert cluster.gateway.telemetry.handovers._value.get() <= 1, "only one turned away"
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_a_group_that_left_the_membership_ends_the_requests_it_has(
    start_cluster: Any,
) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        leaving = chunks[0].start.routing.group
        staying = [group for group in cluster.groups.values() if group.name != leaving]
        cluster.connections.set_addresses(group.address for group in staying)
        assert cluster.connections.num_ready == 1
        cluster.take_steps_of(FAST_S)
        found = await read_rest(call, chunks)
        assert staying[0].executor.num_steps == 0
        while leaving in cluster.connections.loads:
            await cluster.connections.wait_for_change(timeout_s=5)
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_a_stream_under_way_waits_for_room_where_a_new_one_is_refused(
    start_cluster: Any,
) -> None:
    async with start_cluster(
        max_num_waiting=1,
        max_num_seqs=1,
        group_wait_s=30,
        config={"admission": WAIT_AT_GROUPS},
    ) as cluster:
        cluster.take_steps_of(SLOW_S)
        killed, other = cluster.groups.values()
        calls, begun = [], []
        for group in (killed, other):
            cluster.connections.set_addresses([group.address])
            calls.append(generate(cluster, max_tokens=60))
            begun.append(await begin(calls[-1], num_chunks=1))
            assert begun[-1][0].start.routing.group == group.name
        # Fill the other's queue, so that the lost stream finds no room.
        waiting = generate(cluster, max_tokens=2)
        while not other.engine_loop.stats.num_waiting:
            await asyncio.sleep(0.01)
        await killed.kill()
        cluster.take_steps_of(FAST_S)
        found = await read_rest(calls[0], begun[0])
        assert await read_rest(waiting, []) == found[:2]
        await read_rest(calls[1], begun[1])
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=60)


async def test_without_a_retry_budget_a_lost_stream_says_so(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        config = CompletionConfig(retry_burst=0, retry_share=0, retry_per_s=0)
        cluster.gateway.pipeline.resume.budget = RetryBudget(config, clock=lambda: 0.0)
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        await cluster.groups[chunks[0].start.routing.group].kill()
        with pytest.raises(grpc.aio.AioRpcError, match="lost faster than") as raised:
            await read_rest(call, chunks)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_full_queues_are_said_to_be_full(start_cluster: Any) -> None:
    async with start_cluster(
        max_num_waiting=1, max_num_seqs=1, config={"admission": WAIT_AT_GROUPS}
    ) as cluster:
        cluster.take_steps_of(SLOW_S)
        calls = [generate(cluster, max_tokens=300) for _ in range(8)]
        reads = [asyncio.ensure_future(call.read()) for call in calls]
        done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_EXCEPTION)
        refused = [read.exception() for read in done if read.exception() is not None]
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert "max_num_waiting is 1" in (refused[0].details() or "")


def limited(max_inflight: int) -> dict[str, Any]:
    return {"admission": AdmissionConfig(max_inflight=max_inflight)}


async def test_the_gateways_own_limit_is_said_with_its_number(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, config=limited(2)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="max-inflight 2") as raised:
            await begin(generate(cluster, n=3), num_chunks=1)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [("block_size", 16, 4), ("model", "other", "hash"), ("model_fingerprint", "x", "hash-1")],
)
async def test_a_group_that_differs_is_refused_with_both_values(
    start_cluster: Any, start_group: Any, field: str, theirs: object, ours: object
) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        start_group("odd", description={field: theirs}) as odd,
    ):
        (good,) = cluster.groups.values()
        cluster.connections.set_addresses([good.address, odd.address])
        while "odd" not in "".join(cluster.connections.troubles()):
            await asyncio.sleep(0.01)
        (trouble,) = cluster.connections.troubles()
        assert f"group odd has {field}={theirs!r}, this gateway {ours!r}" in trouble
        assert cluster.connections.num_ready == 1


async def test_without_any_group_the_gateway_says_why(start_cluster: Any) -> None:
    async with start_cluster(
        num_groups=1, group_wait_s=0.3, expected={"block_size": 32}
    ) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await begin(generate(cluster), num_chunks=1)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "block_size=4, this gateway 32" in (raised.value.details() or "")


async def test_a_group_that_skips_tokens_is_not_believed(start_cluster: Any) -> None:
    class Skipping(group_pb2_grpc.ReplicaGroupServicer):
        """A group that skips tokens: it answers each request with its third token."""

        async def Describe(self, request: Any, context: Any) -> group_pb2.GroupDescription:
            (honest,) = cluster.groups.values()
            description = group_pb2.GroupDescription()
            description.CopyFrom(honest.service._description)
            description.group_id = "skipping"
            return description

        async def Attach(self, request_iterator: Any, context: Any) -> Any:
            yield group_pb2.StepFrame()
            async for command in request_iterator:
                delta = group_pb2.TokenDelta(
                    request_id=command.submit.request_id,
                    attempt=command.submit.attempt,
                    token_offset=2,
                    token_ids=[9],
                )
                yield group_pb2.StepFrame(step=1, deltas=[delta])

        async def Events(self, request: Any, context: Any) -> Any:
            yield group_pb2.EventBatch(epoch=1)

        HoldAdapter: Any = None  # Not called, as those that follow.
        WriteAdapter: Any = None
        ReadAdapter: Any = None
        Blocks: Any = None
        Warm: Any = None

    async with start_cluster(num_groups=1, group_wait_s=0.3) as cluster:
        server = grpc.aio.server()
        group_pb2_grpc.add_ReplicaGroupServicer_to_server(Skipping(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        cluster.connections.set_addresses([f"127.0.0.1:{port}"])
        while "skipping" not in cluster.connections.loads:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError, match="sent token 2, expected 0") as raised:
            await begin(generate(cluster), num_chunks=1)
        await server.stop(None)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
