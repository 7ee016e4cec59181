"""Answers of the OpenAI API, against the groups' model and through OpenAI's own client."""

import asyncio
import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio


async def test_a_completion_is_what_the_model_says(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        answer = await cluster.openai.completions.create(
            model="hash",
            prompt="the cat",
            seed=4,
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    prompt = cluster.model.tokenizer.encode("the cat")
    expected = cluster.model.continuation(prompt, seed=4, max_tokens=20)
    (choice,) = answer.choices
    assert choice.text == cluster.model.tokenizer.decode(expected)
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 20,
        "total_tokens": len(prompt) + 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_streamed_completion_says_the_same_and_its_usage_last(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        options: dict[str, Any] = {
            "model": "hash",
            "prompt": "the cat",
            "seed": 4,
            "n": 2,
            "extra_body": {"ignore_eos": True},
        }
        whole = await cluster.openai.completions.create(**options)
        stream = await cluster.openai.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 32
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == ["length", "length"]


async def test_each_kind_of_prompt_is_read(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        encode = cluster.model.tokenizer.encode
        answers = {}
        for name, prompt in {
            "text": "the cat",
            "texts": ["the cat", "the mat"],
            "ids": encode("the cat"),
            "lists of ids": [encode("the cat"), encode("the mat")],
        }.items():
            answer = await cluster.openai.completions.create(
                model="hash", prompt=prompt, seed=4, extra_body={"ignore_eos": True}
            )
            assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
            answers[name] = [choice.text for choice in answer.choices]
    assert answers["text"] == answers["ids"] == answers["texts"][:1]
    assert answers["texts"] == answers["lists of ids"]
    assert len(set(answers["texts"])) == 2


async def test_a_chat_is_what_the_model_says_to_the_rendered_template(start_cluster: Any) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "the"}, {"type": "text", "text": " mat"}],
        },
    ]
    async with start_cluster() as cluster:
        options: dict[str, Any] = {
            "model": "hash",
            "messages": messages,
            "seed": 2,
            "max_completion_tokens": 15,
            "extra_body": {"ignore_eos": True},
        }
        whole = await cluster.openai.chat.completions.create(**options)
        stream = await cluster.openai.chat.completions.create(**options, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    prompt = cluster.model.tokenizer.encode(
        "<|system|>be brief<|end|><|user|>the mat<|end|><|assistant|>"
    )
    expected = cluster.model.continuation(prompt, seed=2, max_tokens=15)
    text = cluster.model.tokenizer.decode(expected)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant"
    assert whole.id.startswith("chatcmpl-")
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text


async def test_a_chat_without_a_limit_may_fill_the_context(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        answer = await cluster.openai.chat.completions.create(
            model="hash",
            messages=[{"role": "user", "content": "hi"}],
            seed=1,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 400


async def test_stop_and_vllms_extensions_reach_the_engine(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        prompt = [20, 21]
        expected = cluster.model.continuation(prompt, seed=6, max_tokens=60)
        text = cluster.model.tokenizer.decode(expected)
        stopped = await cluster.openai.completions.create(
            model="hash",
            prompt=prompt,
            seed=6,
            max_tokens=60,
            stop=[text[10:13]],
            extra_body={
                "ignore_eos": True,
                "top_k": -1,
                "min_p": 0.1,
                "repetition_penalty": 1.0,
                "min_tokens": 2,
            },
        )
        by_id = await cluster.openai.completions.create(
            model="hash",
            prompt=prompt,
            seed=6,
            max_tokens=60,
            extra_body={"ignore_eos": True, "stop_token_ids": [expected[4]]},
        )
    assert stopped.choices[0].text == text[: text.index(text[10:13])]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == text[10:13]
    assert by_id.choices[0].stop_reason == expected[4]
    end = expected.index(expected[4])
    assert by_id.choices[0].text == cluster.model.tokenizer.decode(expected[:end])
    assert by_id.choices[0].finish_reason == "stop"


async def test_token_ids_are_shown_to_those_who_ask(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        options: dict[str, Any] = {
            "model": "hash",
            "prompt": [[20, 21], [22]],
            "seed": 6,
            "max_tokens": 30,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        whole = await cluster.openai.completions.create(**options)
        stream = await cluster.openai.completions.create(**options, stream=True)
        streamed: list[list[int]] = [[], []]
        prompts: list[list[int]] = [[], []]
        async for chunk in stream:
            (choice,) = chunk.choices
            streamed[choice.index] += choice.token_ids
            prompts[choice.index] += getattr(choice, "prompt_token_ids", [])
        without = await cluster.openai.completions.create(model="hash", prompt=[20])
    expected = [
        cluster.model.continuation(each, seed=6, max_tokens=30) for each in ([20, 21], [22])
    ]
    assert streamed == expected == [choice.token_ids for choice in whole.choices]
    assert prompts == [[20, 21], [22]] == [choice.prompt_token_ids for choice in whole.choices]
    assert "token_ids" not in without.choices[0].model_dump()
    assert without.system_fingerprint == whole.system_fingerprint
    assert len(without.system_fingerprint) > 10


async def test_each_event_can_have_the_usage_so_far(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        stream = await cluster.openai.completions.create(
            model="hash",
            prompt=[20, 21],
            seed=6,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"ignore_eos": True},
        )
        usages = [chunk.usage async for chunk in stream]
    numbers = [usage.completion_tokens for usage in usages]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 20
    assert {usage.prompt_tokens for usage in usages} == {2}


async def test_a_chat_can_go_on_with_its_last_message(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        options: dict[str, Any] = {
            "model": "hash",
            "messages": [
                {"role": "user", "content": "the cat"},
                {"role": "assistant", "content": "and the"},
            ],
            "seed": 2,
            "max_tokens": 15,
        }
        answers = [
            await cluster.openai.chat.completions.create(
                **options, extra_body={"ignore_eos": True, **asked}
            )
            for asked in ({"continue_final_message": True}, {"add_generation_prompt": False})
        ]
    for answer, rendered in zip(
        answers,
        (
            "<|user|>the cat<|end|><|assistant|>and the",
            "<|user|>the cat<|end|><|assistant|>and the<|end|>",
        ),
        strict=True,
    ):
        prompt = cluster.model.tokenizer.encode(rendered)
        expected = cluster.model.continuation(prompt, seed=2, max_tokens=15)
        assert answer.choices[0].message.content == cluster.model.tokenizer.decode(expected)


async def test_logprobs_have_the_form_of_each_endpoint(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        completion = await cluster.openai.completions.create(
            model="hash",
            prompt="a",
            logprobs=2,
            max_tokens=4,
            seed=3,
            extra_body={"ignore_eos": True},
        )
        chat = await cluster.openai.chat.completions.create(
            model="hash",
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            top_logprobs=3,
            max_tokens=4,
            seed=3,
            extra_body={"ignore_eos": True},
        )
    logprobs = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == completion.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert all(
        top[token] == -0.5
        for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True)
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_requests_with_it(
    start_cluster: Any, stream: bool
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        group = cluster.groups["g0"]
        group.executor.step_s = 0.1
        body = {"prompt": [5], "max_tokens": 390, "ignore_eos": True, "n": 2, "stream": stream}
        async with httpx.AsyncClient(timeout=None) as client:
            request = asyncio.create_task(
                client.post(f"{cluster.http_url}/v1/completions", json=body)
            )
            while group.engine_loop.num_requests < 2:
                await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.wait([request])
        while group.engine_loop.num_requests:
            await asyncio.sleep(0.01)
        await group.settle()
        assert group.executor.num_steps < 390
        assert cluster.table.stats().num_in_flight == 0


async def test_models_health_and_request_ids(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        (listed,) = (await cluster.openai.models.list()).data
        assert (await cluster.openai.models.retrieve("hash")).id == listed.id == "hash"
        healthy = await client.get(
            f"{cluster.http_url}/health", headers={"X-Request-Id": "my request"}
        )
        assert (healthy.status_code, healthy.headers["x-request-id"]) == (200, "my request")
        await cluster.groups["g0"].kill()
        await cluster.wait_ready(0)
        assert (await client.get(f"{cluster.http_url}/health")).status_code == 503


async def test_metrics_count_what_happened(start_cluster: Any) -> None:
    async with start_cluster(num_groups=2) as cluster, httpx.AsyncClient(timeout=None) as client:
        prompt = list(range(10, 30))
        for _ in range(2):
            await cluster.openai.completions.create(
                model="hash", prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True}
            )
            while not cluster.table.stats().directory.num_blocks:
                await asyncio.sleep(0.01)
        response = await client.get(f"{cluster.http_url}/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")
    )
    assert float(values['quire_prompt_tokens_total{model="hash"}']) == 40
    assert float(values['quire_cached_prompt_tokens_total{model="hash"}']) == 16
    assert float(values['quire_output_tokens_total{model="hash"}']) == 16
    assert float(values['quire_completions_total{model="hash",outcome="length"}']) == 2
    assert float(values['quire_time_to_first_token_seconds_count{model="hash"}']) == 2
    assert float(values['quire_time_per_output_token_seconds_count{model="hash"}']) == 2
    assert float(values['quire_routing_decisions_total{model="hash",reason="cached_prefix"}']) == 1
    assert float(values['quire_ready_groups{model="hash"}']) == 2
    assert 'quire_group_held_blocks{group="g1",model="hash"}' in values


async def test_events_of_a_stream_are_well_formed(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        response = await client.post(
            f"{cluster.http_url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True},
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_leaves_while_nothing_is_known_of_the_model_is_not_waited_for(
    start_cluster: Any, stream: bool
) -> None:
    mismatch = {"kv_dtype": "another"}  # No group can attach.
    async with (
        start_cluster(num_groups=1, group_wait_s=300, expected=mismatch) as cluster,
        httpx.AsyncClient(timeout=None) as client,
    ):
        body = {"prompt": "x", "stream": stream}
        post = asyncio.create_task(client.post(f"{cluster.http_url}/v1/completions", json=body))
        while not cluster.connections.demand.num_requests:
            await asyncio.sleep(0.01)
        post.cancel()
        await asyncio.wait([post])
        while cluster.connections.demand.num_requests:  # pytest's timeout is the limit.
            await asyncio.sleep(0.01)
