"""Details beyond answers on which clients of OpenAI's API and of other such servers rely."""

from typing import Any

import httpx
import openai
import pytest

from quire.cluster.edge.openai_http import build_http_app
from quire.cluster.features.installed import INSTALLED

pytestmark = pytest.mark.anyio

ASKED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("chat/completions", "echo", True),
        ("completions", "best_of", 2),
        ("completions", "allowed_token_strs", ["a"]),
        ("chat/completions", "guided_whitespace_pattern", " "),
        ("chat/completions", "logits_processors", ["mat"]),
        ("completions", "reasoning_effort", "high"),
        ("completions", "lora_path", "x"),
    ],
)
async def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(
    start_cluster: Any, path: str, field: str, value: object
) -> None:
    given = {"max_tokens": 1, **ASKED[path]}
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/{path}"
        refused = await client.post(url, json=given | {field: value})
        served = await client.post(url, json=given | {field: None, "user": "someone"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    assert "is not supported: leave it out" in refused.json()["error"]["message"]
    assert served.status_code == 200


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("path", "field", "remedy"),
    [
        (
            "completions",
            {"max_token": 5},
            "max_token=5 is no field of this request: did you mean max_t",
        ),
        ("completions", {"messages": []}, "messages=[] is no field of this request"),
        (
            "chat/completions",
            {"xyzzy": None},
            "xyzzy=None is no field of this request: leave it out",
        ),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"include_usages": True}},
            "did you mean include_usage?",
        ),
    ],
)
async def test_a_field_that_is_not_known_is_refused_by_name_unless_told_otherwise(
    start_cluster: Any, path: str, field: dict[str, Any], remedy: str
) -> None:
    given = {"max_tokens": 1, **ASKED[path], **field}
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        response = await client.post(f"{cluster.http_url}/v1/{path}", json=given)
        app = build_http_app(cluster.models, features=INSTALLED, ignore_unknown_fields=True)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as lenient:
            ignored = await lenient.post(f"/v1/{path}", json=given)
            unserved = await lenient.post(f"/v1/{path}", json=given | {"lora_path": "x"})
    assert response.status_code == unserved.status_code == 400
    assert remedy in response.json()["error"]["message"]
    assert ignored.status_code == 200


async def test_the_model_may_be_null_or_left_out(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for model in ({}, {"model": None}, {"model": ""}):
            response = await client.post(
                f"{cluster.http_url}/v1/completions", json={"prompt": "x", **model}
            )
            assert response.json()["model"] == "hash"


@pytest.mark.slow
async def test_a_prompt_that_is_too_long_is_known_by_openais_code_and_words(
    start_cluster: Any,
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        for prompt, max_tokens in ([1] * 100_000, 1), ([1], 100_000):
            with pytest.raises(openai.BadRequestError) as raised:
                await cluster.openai.completions.create(
                    model="hash", prompt=prompt, max_tokens=max_tokens
                )
            assert raised.value.code == "context_length_exceeded"
            assert "this model's maximum context length is " in raised.value.message


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [1, "a"]}, "prompt=[1, 'a']: must be a string, a list of strings, a list of t"),
        ({"prompt": {"a": 1}}, "prompt={'a': 1}: must be a string, a list of strings, a list of t"),
        ({"prompt": "x", "stop": 5}, "stop=5: must be a string or a list of strings"),
        ({"prompt": "x", "stop": [1]}, "stop=[1]: must be a string or a list of strings"),
        ({"prompt": "x", "seed": "y"}, "seed='y': Input should be a valid integer"),
        ({"prompt": "x", "seed": "y" * 9_999}, "seed='yyyyyyyyyyyy...yyyyyyyyyyyyy': Input should"),
        ({}, "prompt: Field required"),
    ],
)
async def test_a_value_of_the_wrong_kind_is_told_which_kinds_there_are(
    start_cluster: Any, body: dict[str, Any], message: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{cluster.http_url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/", "GET /: Not Found; GET /docs shows all paths"),
        ("POST", "/v1/batches", "POST /v1/batches: Not Found; GET /docs shows all paths"),
        ("POST", "/chat/completions", "POST /chat/completions: Not Found; is /v1/chat/completions"),
        ("GET", "/v1/v1/models", "GET /v1/v1/models: Not Found; is /v1/models meant?"),
        ("POST", "/v1/chat/completion", "POST /v1/chat/completion: Not Found; is /v1/chat/compl"),
        ("GET", "/doc", "GET /doc: Not Found; is /docs meant?"),
        ("GET", "/v1/completions", "GET /v1/completions: Method Not Allowed; use POST"),
    ],
)
async def test_who_comes_to_the_wrong_place_is_told_the_right_ones(
    start_cluster: Any, method: str, path: str, message: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.request(method, f"{cluster.http_url}{path}")
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_can_be_asked_about_by_its_request_id(
    start_cluster: Any, stream: bool
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        body = {"prompt": "the cat", "max_tokens": 1, "stream": stream}
        url = f"{cluster.http_url}/v1/completions"
        answer = await client.post(url, json=body)
        name = answer.headers["X-Request-Id"]
        assert name in answer.text
        asked = f"{cluster.http_url}/v1/routing/decisions?request_id={name}"
        assert (await client.get(asked)).status_code == 200
        named = await client.post(url, json=body, headers={"X-Request-Id": "mine"})
        assert named.headers.get_list("X-Request-Id") == ["mine"]


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_do_not_try_again_what_has_no_time_left(
    start_cluster: Any, stream: bool
) -> None:
    """OpenAI's clients would retry twice, and report the error only after three timeouts."""
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        body = {"prompt": "the cat", "timeout": 1e-6, "stream": stream}
        answer = await client.post(f"{cluster.http_url}/v1/completions", json=body)
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"


async def test_browsers_may_call_from_the_pages_that_are_allowed_and_no_others(
    start_cluster: Any,
) -> None:
    ours = "http://localhost:3000"
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for origin, allowed in (ours, ours), ("http://elsewhere", None):
            asked = await client.options(
                f"{cluster.http_url}/v1/chat/completions",
                headers={
                    "Origin": origin,
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization,content-type",
                },
            )
            assert asked.status_code == (200 if allowed else 400)
            answer = await client.get(f"{cluster.http_url}/v1/models", headers={"Origin": origin})
            for each in asked, answer:
                assert each.headers.get("Access-Control-Allow-Origin") == allowed
