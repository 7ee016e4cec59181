"""Bad words through a gateway, which tokenizes them, also after a group's death."""

from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio


def generate(cluster: Any, *, words: tuple[str, ...] = (), ids: Any = ()) -> Any:
    params = pb.SamplingParams(
        seed=5,
        max_tokens=60,
        ignore_eos=True,
        bad_words=words,
        bad_words_token_ids=[pb.TokenIds(ids=each) for each in ids],
    )
    return cluster.inference.Generate(pb.GenerateRequest(text="the cat", sampling=params))


async def tokens_of(call: Any) -> list[int]:
    return [token async for chunk in call for token in chunk.token_ids]


async def test_a_word_is_spelled_by_the_gateway_for_both_protocols(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        given = {"prompt": "the cat", "seed": 5, "max_tokens": 60, "ignore_eos": True}
        url = f"{cluster.http_url}/v1/completions"
        free = await tokens_of(generate(cluster))
        tokenizer = cluster.gateway.tokenizer
        word = next(text for token in free if (text := tokenizer.token_text(token).strip()))
        spelled = tokenizer.encode(word, add_special_tokens=False)
        body = given | {"bad_words": [word], "return_token_ids": True}
        answer = (await client.post(url, json=body)).json()["choices"][0]["token_ids"]
        refused = await client.post(url, json=given | {"bad_words": [" "]})
        assert len(spelled) == 1
        assert answer == await tokens_of(generate(cluster, words=(word,)))
        assert spelled[0] in free
        assert spelled[0] not in answer
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "bad_words"
        with pytest.raises(grpc.aio.AioRpcError, match="99999 at position 1") as raised:
            await tokens_of(generate(cluster, ids=[[5, 99_999]]))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_goes_on_exactly_when_its_group_is_killed(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        free = await tokens_of(generate(cluster))
        ids = [*pairwise(free)][::10]
        whole = await tokens_of(generate(cluster, ids=ids))
        assert whole != free
        assert not {*pairwise(whole)} & {*ids}
        cluster.take_steps_of(0.05)
        call = generate(cluster, ids=ids)
        chunks = aiter(call)
        begun = [await anext(chunks) for _ in range(5)]
        await cluster.groups[begun[0].start.routing.group].kill()
        cluster.take_steps_of(0)
        rest = await tokens_of(call)
        assert cluster.gateway.telemetry.resumes._value.get() == 1
    assert [token for chunk in begun for token in chunk.token_ids] + rest == whole
