"""Echo and log-probabilities of prompts, as evaluation harnesses request them."""

from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_a_harness_gets_the_scores_of_its_prompt(start_cluster: Any, max_tokens: int) -> None:
    async with start_cluster(num_groups=1) as cluster:
        encode, decode = cluster.model.tokenizer.encode, cluster.model.tokenizer.decode
        prompts = [encode("the cat"), encode("a"), encode("the mat sat")]
        answer = await cluster.openai.completions.create(
            model="hash",
            prompt=prompts,
            echo=True,
            logprobs=2,
            max_tokens=max_tokens,
            seed=4,
            extra_body={"ignore_eos": True},
        )
        expected = [
            cluster.model.continuation(prompt, seed=4, max_tokens=max_tokens) for prompt in prompts
        ]
    for choice, prompt, output in zip(answer.choices, prompts, expected, strict=True):
        assert choice.text == decode([*prompt, *output])
        shown = choice.logprobs
        assert shown.tokens == [decode([token]) for token in [*prompt, *output]]
        assert shown.token_logprobs == [None, *[-0.5] * (len(prompt) - 1 + max_tokens)]
        assert shown.top_logprobs[0] is None
        assert all(
            top[token] == -0.5
            for top, token in zip(shown.top_logprobs[1:], shown.tokens[1:], strict=True)
        )
        starts = [len("".join(shown.tokens[:index])) for index in range(len(shown.tokens))]
        assert shown.text_offset == starts
        assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens * len(prompts)


async def test_the_beginning_of_a_prompt_may_go_without_scores(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        prompt = cluster.model.tokenizer.encode("the mat sat on the cat")
        asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            whole, end = [
                (await client.post("/v1/completions", json=asked | more)).json()["choices"][0]
                for more in ({}, {"logprob_start_len": 4})
            ]
            asked |= {"logprob_start_len": 99}
            refused = (await client.post("/v1/completions", json=asked)).json()["error"]
    assert len(prompt) > 5
    for name in ("tokens", "text_offset"):
        assert end["logprobs"][name] == whole["logprobs"][name]
    for name in ("token_logprobs", "top_logprobs"):
        assert end["logprobs"][name] == [None] * 4 + whole["logprobs"][name][4:]
    assert end["prompt_logprobs"] == [None] * 4 + whole["prompt_logprobs"][4:]
    assert refused["message"].startswith("logprob_start_len=99 is out of range: the prompt has")


async def test_a_prompt_is_echoed_as_it_was_sent_and_before_each_completion(
    start_cluster: Any,
) -> None:
    options: dict[str, Any] = {
        "model": "hash",
        "prompt": "the cat",
        "echo": True,
        "n": 2,
        "seed": 4,
        "extra_body": {"ignore_eos": True},
    }
    async with start_cluster(num_groups=1) as cluster:
        whole = await cluster.openai.completions.create(**options)
        plain = await cluster.openai.completions.create(**options | {"echo": False})
        stream = await cluster.openai.completions.create(**options, stream=True)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    expected = {choice.index: "the cat" + choice.text for choice in plain.choices}
    assert {choice.index: choice.text for choice in whole.choices} == expected
    assert texts == expected


async def test_vllms_prompt_logprobs(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        prompt = cluster.model.tokenizer.encode("the cat")
        asked = {"max_tokens": 1, "prompt_logprobs": 1}
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            completion = await client.post("/v1/completions", json=asked | {"prompt": prompt})
            messages = [{"role": "user", "content": "hi"}]
            chat = await client.post("/v1/chat/completions", json=asked | {"messages": messages})
    scores = completion.json()["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == len(prompt)
    for token, score in zip(prompt[1:], scores[1:], strict=True):
        assert score[str(token)]["logprob"] == -0.5
        assert score[str(token)]["rank"] == 1
        text = cluster.model.tokenizer.token_text(token)
        assert score[str(token)]["decoded_token"] == text
    chat_scores = chat.json()["prompt_logprobs"]
    assert len(chat_scores) == chat.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is only allowed when stream"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo with logprobs is only allowed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 is out of range: 0 to 20"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range: 1 or more"),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    start_cluster: Any, field: dict[str, Any], said: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/completions"
        answer = await client.post(url, json={"prompt": "x", **field})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
