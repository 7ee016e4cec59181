"""Flow control: a stalled reader delays neither other readers nor the gateway, nor holds blocks."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from tests.prepared import prepared

from quire.cluster.gateway.chunk import Chunk
from quire.cluster.wire import tokens_to_bytes, work_of
from quire.v1 import group_pb2, group_pb2_grpc, inference_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.request.request import Request, Tokens
from quire.worker.request.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
WINDOW = 16
# The smallest read-ahead of gRPC, so that few tokens fill it.
_SMALL_WINDOWS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


def request(*, seed: int, max_tokens: int, **sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **sampling)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=params)


def streams_of(cluster: Any) -> list[Any]:
    (client,) = cluster.connections._attached.values()
    return list(client._streams.values())


async def tokens_of(call: Any) -> list[int]:
    return [token async for chunk in call for token in chunk.token_ids]


@pytest.mark.slow
async def test_a_slow_reader_blocks_only_itself(start_cluster: Any) -> None:
    async with (
        start_cluster(
            num_groups=1,
            client={"window_tokens": WINDOW},
            max_num_seqs=32,
            num_blocks=2000,
        ) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address, options=_SMALL_WINDOWS) as channel,
    ):
        (group,) = cluster.groups.values()
        group.executor.step_s = 0.01
        slow = inference_pb2_grpc.InferenceStub(channel).Generate(
            request(seed=99, max_tokens=350, logprobs=20)
        )
        chunks = aiter(slow)
        found_slow = list((await anext(chunks)).token_ids)  # Then stops reading.
        fast = [cluster.inference.Generate(request(seed=seed, max_tokens=60)) for seed in range(16)]
        first = [await anext(aiter(call)) for call in fast]
        num_fast_steps = 0
        execute = group.executor.execute

        def count(step: Any) -> Any:
            nonlocal num_fast_steps
            num_fast_steps += len(step.seq_lens_B) > 1
            return execute(step)

        group.executor.execute = count
        rest = await asyncio.gather(*[tokens_of(call) for call in fast])
        assert num_fast_steps < 60, "a token each step"

        await group.settle()  # The engine completes the slow request and keeps no blocks.
        (stream,) = streams_of(cluster)
        assert not stream.is_owed
        assert stream.num_buffered <= WINDOW
        assert stream.num_tokens < 350
        num_unsent = 350 - stream.num_tokens  # Unsent tokens wait at the group, which reports them.
        while cluster.connections.loads["g0"].num_unsent_tokens != num_unsent:
            await asyncio.sleep(0.01)
        found_slow += [token async for chunk in chunks for token in chunk.token_ids]
        assert not streams_of(cluster)
    assert found_slow == cluster.model.continuation(PROMPT, seed=99, max_tokens=350)
    for seed, (chunk, tokens) in enumerate(zip(first, rest, strict=True)):
        found = [*chunk.token_ids, *tokens]
        assert found == cluster.model.continuation(PROMPT, seed=seed, max_tokens=60)


@pytest.mark.slow
async def test_a_stalled_reader_is_not_taken_for_a_hung_group(start_cluster: Any) -> None:
    async with start_cluster(
        num_groups=1, client={"window_tokens": WINDOW, "step_deadline_s": 1.5}
    ) as cluster:
        params = SamplingParams(seed=5, max_tokens=200, ignore_eos=True)
        prepared = await cluster.gateway.prepare(Request(prompt=(Tokens(PROMPT),), sampling=params))
        found: list[int] = []

        async def take(chunk: Chunk) -> None:
            if not found:  # Reads the first chunk only.
                await cluster.groups["g0"].settle()
                await asyncio.sleep(2.5)
            found.extend(chunk.token_ids)

        await cluster.gateway.run([prepared], take)
        assert cluster.gateway.telemetry.resumes._value.get() == 0
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=200)


# At the group, over its own protocol.


@asynccontextmanager
async def attach(group: Any) -> Any:
    async with grpc.aio.insecure_channel(group.address) as channel:
        yield group_pb2_grpc.ReplicaGroupStub(channel).Attach()


def submit(*, token_limit: int, resumed: list[int], **sampling: Any) -> group_pb2.GroupCommand:
    return group_pb2.GroupCommand(
        submit=group_pb2.Submit(
            request_id="a",
            attempt=1,
            resumed_token_ids=tokens_to_bytes(resumed),
            work=work_of(prepared("", PROMPT, seed=5, ignore_eos=True, **sampling)),
            token_limit=token_limit,
        )
    )


def credit(token_limit: int) -> group_pb2.GroupCommand:
    return group_pb2.GroupCommand(
        credit=group_pb2.Credit(request_id="a", attempt=1, token_limit=token_limit)
    )


@pytest.mark.parametrize("num_resumed", [0, 7])
async def test_a_group_sends_up_to_the_limit_and_the_rest_in_one_delta(
    start_group: Any, model: Any, num_resumed: int
) -> None:
    expected = model.continuation(PROMPT, seed=5, max_tokens=50)
    async with start_group() as group, attach(group) as call:
        await call.write(
            submit(token_limit=10, resumed=expected[:num_resumed], max_tokens=50, logprobs=2)
        )
        found = expected[:num_resumed]
        for limit in (10, 11, 30, 50):
            await call.write(credit(limit))
            num_deltas = 0
            while len(found) < limit:
                for delta in (await call.read()).deltas:
                    assert delta.token_offset == len(found)
                    assert len(delta.logprobs) == len(delta.token_ids)
                    found += delta.token_ids
                    num_deltas += 1
                    is_end = bool(delta.finish_reason)
            assert len(found) == limit, "no more than it may"
            assert is_end == (limit == 50)
            if limit == 10:
                await group.settle()
                frame = await call.read()
                while frame.load.num_unsent_tokens != 40:
                    assert not frame.deltas
                    frame = await call.read()
            else:
                assert num_deltas == 1, "what waited is merged"
        assert (await call.read()).load.num_unsent_tokens == 0
    assert found == expected


async def test_an_end_that_brings_no_token_needs_no_credit(start_group: Any, model: Any) -> None:
    expected = model.continuation(PROMPT, seed=5, max_tokens=20)
    async with start_group() as group, attach(group) as call:
        # No tokens remain after those resumed.
        await call.write(submit(token_limit=20, resumed=expected, max_tokens=20))
        deltas: list[Any] = []
        while not deltas:
            deltas += (await call.read()).deltas
    (delta,) = deltas
    assert delta.finish_reason == pb.FINISH_REASON_LENGTH
    assert not delta.token_ids
