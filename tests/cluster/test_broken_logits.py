"""A request with NaN logits: its client gets an error, no group dies, and it is not retried."""

from typing import Any

import grpc
import grpc.aio
import openai
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
POISON = 45


def generate(cluster: Any, prompt: list[int]) -> Any:
    params = pb.SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    ids = pb.TokenIds(ids=prompt)
    return cluster.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling=params))


async def tokens_of(call: Any) -> list[int]:
    return [token_id async for chunk in call for token_id in chunk.token_ids]


async def test_it_fails_by_name_once_and_the_group_serves_on(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        for group in cluster.groups.values():
            group.executor.breaks_at = POISON
        with pytest.raises(grpc.aio.AioRpcError, match="NaN or infinite logits at pos") as raised:
            await tokens_of(generate(cluster, [*PROMPT, POISON]))
        assert raised.value.code() == grpc.StatusCode.INTERNAL
        assert sum(group.executor.num_steps > 0 for group in cluster.groups.values()) == 1
        with pytest.raises(openai.InternalServerError, match="NaN or infinite logits") as answered:
            await cluster.openai.completions.create(model="hash", prompt=[*PROMPT, POISON])
        assert answered.value.code == "broken_logits"
        assert answered.value.response.headers["x-should-retry"] == "false"
        assert cluster.connections.num_ready == 2
        assert cluster.gateway.telemetry.resumes._value.get() == 0
        for group in cluster.groups.values():
            group.executor.breaks_at = None
        found = await tokens_of(generate(cluster, PROMPT))
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=30)


async def test_the_tokens_before_it_arrive(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        whole = cluster.model.continuation(PROMPT, seed=5, max_tokens=30)
        num_sound = next(n for n, token in enumerate(whole) if n > 3 and token not in whole[:n]) + 1
        cluster.groups["g0"].executor.breaks_at = whole[num_sound - 1]
        chunks = aiter(generate(cluster, PROMPT))
        found: list[int] = []
        while len(found) < num_sound:
            found += (await anext(chunks)).token_ids
        said = f"behind 21 tokens of prompt and {num_sound} of output"
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await anext(chunks)
    assert found == whole[:num_sound]
