"""Hanging groups and lost gateways whose connections stay open."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.prepared import prepared

from quire.cluster.wire import work_of
from quire.v1 import group_pb2, group_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import RankFailure

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
NUM_TOKENS = 120


class Hang:
    """Blocks an executor within a step until released."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._release = threading.Event()

    def stop(self, group: Any) -> None:
        execute = group.executor.execute

        def hang(step: Any) -> Any:
            self.has_begun.set()
            self._release.wait()
            return execute(step)

        group.executor.execute = hang

    def release(self) -> None:
        self._release.set()


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.release()


def generate(cluster: Any, *, seed: int = 5) -> Any:
    params = pb.SamplingParams(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    return cluster.inference.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=params)
    )


async def begin(call: Any, *, num_chunks: int) -> list[pb.GenerateResponse]:
    chunks = aiter(call)
    return [await anext(chunks) for _ in range(num_chunks)]


async def tokens_of(call: Any, chunks: list[pb.GenerateResponse]) -> list[int]:
    chunks += [chunk async for chunk in call]
    return [token for chunk in chunks for token in chunk.token_ids]


async def read_to_end(call: Any) -> None:
    while await call.read() != grpc.aio.EOF:
        pass


@pytest.mark.slow
async def test_a_group_that_beats_but_does_not_step_is_left_by_the_gateway(
    start_cluster: Any, hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_cluster(client={"step_deadline_s": 1.5}) as cluster:
        cluster.take_steps_of(0.1)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        hung = cluster.groups[chunks[0].start.routing.group]
        hang.stop(hung)
        cluster.take_steps_of(0.002)
        found = await tokens_of(call, chunks)
        assert "no step for 1.5 s, with work to do" in caplog.text
        assert cluster.gateway.telemetry.resumes._value.get() >= 1
        hang.release()
        await hung.settle()
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_a_hung_step_fails_the_whole_group_which_is_then_left(
    start_cluster: Any, hang: Hang
) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(0.1)
        call = generate(cluster)
        chunks = await begin(call, num_chunks=3)
        hung = cluster.groups[chunks[0].start.routing.group]
        hung.engine_loop.watch(step_deadline_s=0.2)
        hang.stop(hung)
        cluster.take_steps_of(0.002)
        found = await tokens_of(call, chunks)
        failure = await hung.engine_loop.failed
        assert isinstance(failure, RankFailure)
        assert "has not ended within 0.2 s" in str(failure)
        await cluster.wait_ready(1)
        assert "has not ended within 0.2 s" in cluster.connections.troubles()[0]
        # The step's late output belongs to no request.
        hang.release()
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


@pytest.mark.slow
async def test_an_idle_engine_and_a_working_one_pass_the_watch(start_group: Any) -> None:
    async with start_group() as group:
        group.engine_loop.watch(step_deadline_s=2)
        await asyncio.sleep(2.5)
        group.executor.step_s = 0.01
        request = prepared("a", PROMPT, seed=1, max_tokens=60, ignore_eos=True)
        ended = asyncio.Event()
        group.engine_loop.submit(
            request, lambda output: ended.set() if output.finish_reason else None
        )
        await ended.wait()
        assert not group.engine_loop.failed.done()


async def test_closing_does_not_wait_for_a_thread_that_hangs(start_group: Any, hang: Hang) -> None:
    async with start_group() as group:
        group.engine_loop.watch(step_deadline_s=0.1)
        hang.stop(group)
        request = prepared("a", PROMPT, seed=1, max_tokens=5)
        group.engine_loop.submit(request, lambda output: None)
        await asyncio.to_thread(hang.has_begun.wait)
        await group.engine_loop.close()
        assert group.engine_loop.failed.done()


async def test_a_gateway_that_falls_silent_has_its_requests_aborted(start_group: Any) -> None:
    async with start_group(service={"gateway_timeout_s": 0.4}) as group:
        group.executor.step_s = 0.1
        async with grpc.aio.insecure_channel(group.address) as channel:
            call = group_pb2_grpc.ReplicaGroupStub(channel).Attach()
            work = work_of(prepared("", PROMPT, seed=1, max_tokens=300, ignore_eos=True))
            submit = group_pb2.Submit(request_id="a", attempt=1, work=work)
            await call.write(group_pb2.GroupCommand(submit=submit))
            with pytest.raises(grpc.aio.AioRpcError, match="said nothing for") as raised:
                await read_to_end(call)
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await group.settle()
            assert group.executor.num_steps < 300


@pytest.mark.slow
async def test_a_gateway_that_neither_reads_nor_speaks_keeps_no_blocks(start_group: Any) -> None:
    """The group is blocked in a write."""
    small_windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with start_group(service={"gateway_timeout_s": 2.0}) as group:
        group.executor.step_s = 0.004
        async with grpc.aio.insecure_channel(group.address, options=small_windows) as channel:
            call = group_pb2_grpc.ReplicaGroupStub(channel).Attach()
            request = prepared("", PROMPT, seed=1, max_tokens=370, ignore_eos=True, logprobs=20)
            work = work_of(request)
            for number in range(8):
                submit = group_pb2.Submit(request_id=f"r{number}", attempt=1, work=work)
                await call.write(group_pb2.GroupCommand(submit=submit))
            while not group.service._attachments:
                await asyncio.sleep(0.01)
            (attachment,) = group.service._attachments
            while attachment.num_unsent_tokens < 100:  # The write of a frame is blocked.
                await call.write(group_pb2.GroupCommand())  # Keeps the gateway alive until then.
                await asyncio.sleep(0.01)
            while group.service.num_requests:
                await asyncio.sleep(0.01)
            await group.settle()
            assert attachment.num_requests == attachment.num_unsent_tokens == 0
            call.cancel()


@pytest.mark.slow
async def test_a_gateway_with_nothing_to_say_is_heard_all_the_same(start_cluster: Any) -> None:
    async with start_cluster(
        num_groups=1,
        client={"silence_timeout_s": 2},
        service={"gateway_timeout_s": 2},
    ) as cluster:
        (group,) = cluster.groups.values()
        (attachment,) = group.service._attachments
        await asyncio.sleep(3)
        assert group.service._attachments == [attachment], "never attached again"
