"""Thinking budgets and log-probabilities of named tokens through a gateway, over both protocols."""

from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from quire.v1 import inference_pb2 as pb
from quire.worker.text.reasoning import ReasoningFormat

pytestmark = pytest.mark.anyio

MARKS = ReasoningFormat(name="x", opens="<|system|>", closes="<|user|>", signs=())
PROMPT = "the cat<|system|>"


def generate(cluster: Any, **params: Any) -> Any:
    sampling = pb.SamplingParams(seed=5, max_tokens=40, ignore_eos=True, **params)
    return cluster.inference.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling))


async def tokens_of(call: Any) -> list[int]:
    return [token async for chunk in call for token in chunk.token_ids]


async def test_the_marks_are_the_models_for_both_protocols(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        (end,) = cluster.gateway.tokenizer.encode(MARKS.closes)
        body: Any = {"seed": 5, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        body["thinking_token_budget"] = 7
        url = f"{cluster.http_url}/v1/completions"
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROMPT}]
        refused = await client.post(url, json=body | {"prompt": PROMPT})
        cluster.gateway.dialect = replace(cluster.gateway.dialect, reasoning=MARKS)
        answer = await client.post(url, json=body | {"prompt": PROMPT})
        by_chat = await client.post(
            f"{cluster.http_url}/v1/chat/completions",
            json=body | {"messages": chat, "continue_final_message": True},
        )
        free = await tokens_of(generate(cluster))
        bounded = await tokens_of(generate(cluster, thinking_token_budget=7))
        given = await tokens_of(
            generate(cluster, thinking_token_budget=7, thinking_token_ids=[end])
        )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"
    assert bounded[:8] == [*free[:7], end]
    assert len(bounded) == len(free)
    assert answer.json()["choices"][0]["token_ids"] == given == bounded
    assert by_chat.json()["choices"][0]["token_ids"].index(end) == 7


async def test_a_stream_goes_on_exactly_when_its_group_is_killed(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        (end,) = cluster.gateway.tokenizer.encode(MARKS.closes)
        params = {"thinking_token_budget": 20, "thinking_token_ids": [end]}
        whole = await tokens_of(generate(cluster, **params))
        assert whole.index(end) == 20
        cluster.take_steps_of(0.05)
        chunks = aiter(generate(cluster, **params))
        begun = [await anext(chunks) for _ in range(5)]
        await cluster.groups[begun[0].start.routing.group].kill()
        cluster.take_steps_of(0)
        rest = [token async for chunk in chunks for token in chunk.token_ids]
        assert cluster.gateway.telemetry.resumes._value.get() == 1
    assert [token for chunk in begun for token in chunk.token_ids] + rest == whole


async def test_named_tokens_are_told_where_log_probabilities_are(
    start_cluster: Any,
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        tokenizer = cluster.gateway.tokenizer
        named = tokenizer.encode("cmz", add_special_tokens=False)
        asked = {"max_tokens": 3, "seed": 5, "logprob_token_ids": named, "ignore_eos": True}
        completion = await client.post(
            f"{cluster.http_url}/v1/completions", json=asked | {"prompt": "the cat"}
        )
        chat = await client.post(
            f"{cluster.http_url}/v1/chat/completions",
            json=asked | {"messages": [{"role": "user", "content": "?"}]},
        )
        refusals = [
            await client.post(f"{cluster.http_url}/v1/{path}", json=body)
            for path, body in (
                ("responses", {"input": "a", "logprob_token_ids": named}),
                ("completions", {"prompt": "a", "logprob_token_ids": [99_999]}),
            )
        ]
        with pytest.raises(grpc.aio.AioRpcError, match="logprob_token_ids has 129") as raised:
            await tokens_of(generate(cluster, logprob_token_ids=range(129)))
        call = generate(cluster, logprob_token_ids=named)
        told = [each async for chunk in call for each in chunk.logprobs]
    for top in completion.json()["choices"][0]["logprobs"]["top_logprobs"]:
        assert {*"cmz"} <= {*top}
    for entry in chat.json()["choices"][0]["logprobs"]["content"]:
        assert [each["token"] for each in entry["top_logprobs"]] == [*"cmz"]
    assert [[top.token_id for top in each.top] for each in told] == [named] * 40
    assert [each.status_code for each in refusals] == [400, 400]
    assert all("logprob_token_ids" in each.text for each in refusals)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
