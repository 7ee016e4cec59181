"""Refused requests of the OpenAI API, and their errors."""

from typing import Any

import httpx
import openai
import pydantic
import pytest

from quire.cluster.edge.openai_schema import CompletionBody

pytestmark = pytest.mark.anyio

BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "other"}, 404, None, "'other' does not exist"),
    ({"temperature": -1}, 400, "temperature", "temperature=-1"),
    ({"temperature": "hot"}, 400, "temperature", "valid number"),
    ({"max_tokens": 0}, 400, "max_tokens", "1 or more"),
    ({"max_tokens": 10_000}, 400, "max_tokens", "max_tokens=10000 is 10001 tokens"),
    ({"prompt": []}, 400, "prompt", "prompt is empty"),
    ({"prompt": [99_999]}, 400, "prompt", "99999"),
    ({"prompt": None}, 400, "prompt", "prompt"),
    ({"n": 128, "prompt": ["a"] * 9}, 400, "n", "1152"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"five": 1}}, 400, "logit_bias", "'five'"),
    ({"logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", "out of range"),
    ({"logit_bias": {"٣": 1}}, 400, "logit_bias", "out of range"),
    ({"repetition_penalty": 1e-300}, 400, "repetition_penalty", "0.01 to 100"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "99999"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, 400, "logit_bias", "at most 1024"),
    ({"suffix": "."}, 400, "suffix", "not supported"),
    ({"stop": [""]}, 400, "stop", "none empty"),
    ({"max_tokens": 10_000, "stream": True}, 400, "max_tokens", "max_tokens=10000"),
]


async def test_bad_completions_are_refused_in_openais_words(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for body, status, param, words in BAD_COMPLETIONS:
            response = await client.post(
                f"{cluster.http_url}/v1/completions", json={"model": "hash", "prompt": [5], **body}
            )
            error = response.json()["error"]
            assert response.status_code == status
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert words in error["message"]
            is_long = "max_tokens" in words
            codes = {"model_not_found": status == 404, "context_length_exceeded": is_long}
            assert error["code"] == next((code for code, holds in codes.items() if holds), None)


TOOL = {"type": "function", "function": {"name": "f"}}
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "'image_url' is not supported",
    ),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "User", "content": "x"}]}, "messages[0].role='User': must be one of"),
    ({"top_logprobs": 2}, "logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "0 to 20"),
    ({"tools": [{"type": "function"}]}, "tools[0]: function=None must be an object"),
    ({"tools": [{"type": "web_search"}]}, "type='web_search' is not supported"),
    ({"tools": [TOOL, TOOL]}, "two have the name 'f'"),
    ({"tool_choice": "required"}, "tool_choice is only allowed with tools"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice='some': must be 'auto', 'none', 'r"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names the function 'g': it is not in tools",
    ),
    ({"reasoning_effort": "huge"}, "reasoning_effort='huge': must be one of none, minimal, low"),
    ({"response_format": {"type": "xml"}}, "response_format="),
]


async def test_bad_chats_are_refused_in_openais_words(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for body, words in BAD_CHATS:
            response = await client.post(
                f"{cluster.http_url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], **body},
            )
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]


async def test_the_openai_client_raises_its_own_errors(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, group_wait_s=0.2) as cluster:
        with pytest.raises(openai.NotFoundError) as raised:
            await cluster.openai.completions.create(model="other", prompt="x")
        assert raised.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            await cluster.openai.completions.create(model="hash", prompt="x", top_p=2)
        await cluster.groups["g0"].kill()
        await cluster.wait_ready(0)
        with pytest.raises(openai.InternalServerError) as unavailable:
            await cluster.openai.completions.create(model="hash", prompt="x")
        assert unavailable.value.status_code == 503


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"{", "not JSON"), (b'{"prompt": "\\ud800"}', "not JSON"), (b"[]", "object")],
)
async def test_a_body_that_cannot_be_read_is_a_bad_request(
    start_cluster: Any, data: bytes, words: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        response = await client.post(f"{cluster.http_url}/v1/completions", content=data)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_unknown_paths_and_methods_answer_in_the_same_form(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        unknown = await client.get(f"{cluster.http_url}/v1/nothing")
        near = await client.get(f"{cluster.http_url}/v1/chat/completion")
        root = await client.get(f"{cluster.http_url}/")
        wrong = await client.get(f"{cluster.http_url}/v1/completions")
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert near.json()["error"]["message"].endswith("; is /v1/chat/completions meant?")
    for answer, path in ((unknown, "/v1/nothing"), (root, "/")):
        message = answer.json()["error"]["message"]
        assert message == f"GET {path}: Not Found; GET /docs shows all paths"
    assert wrong.headers["allow"] == "POST"


async def test_what_breaks_later_is_an_error_in_the_stream(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, group_wait_s=0.3) as cluster:
        cluster.take_steps_of(0.1)
        stream = await cluster.openai.completions.create(
            model="hash",
            prompt="x",
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await cluster.groups["g0"].kill()
        with pytest.raises(openai.APIError, match="no replica group"):
            async for _ in stream:
                pass


async def test_internal_errors_carry_an_incident_number_and_the_request_id(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        monkeypatch.setattr(cluster.gateway, "prepare", lambda _: 1 / 0)
        response = await client.post(
            f"{cluster.http_url}/v1/completions",
            json={"prompt": "x"},
            headers={"X-Request-Id": "abc"},
        )
    message = response.json()["error"]["message"]
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc"
    assert "ZeroDivision" not in response.text
    assert message.rsplit(" ", 1)[1] in caplog.text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cache_salt", "x" * 5_000_000, "cache_salt has 5000000 characters: at most 1000"),
        ("stop", ["a", "x" * 5_000_000], "stop has a string of 5000000 characters: at most 1000"),
        ("stop_token_ids", [9] * 2000, "stop_token_ids has 2000: at most 1000"),
    ],
)
async def test_what_a_client_makes_long_is_refused_and_breaks_nobodys_stream(
    start_cluster: Any, field: str, value: object, message: str
) -> None:
    async with start_cluster() as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(
            f"{cluster.http_url}/v1/completions", json={"prompt": "the cat", field: value}
        )
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert cluster.gateway.telemetry.resumes._value.get() == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1.5] * 10_000},
        {"prompt": [[1.5] * 100] * 100},
        {"prompt": ["x"] * 10_000},
        {"prompt": "x", "stop": [1] * 10_000},
        {"prompt": "x", "stop_token_ids": ["x"] * 10_000},
    ],
)
def test_what_is_wrong_ends_the_reading_of_a_body(body: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        CompletionBody.model_validate(body)
    assert raised.value.error_count() <= 4  # One for each type of prompt.


async def test_too_many_prompts_are_refused_by_name(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(
            f"{cluster.http_url}/v1/completions", json={"prompt": ["x"] * 1025}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "at most 1024" in answer.json()["error"]["message"]
