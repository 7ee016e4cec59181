"""Structured output through a gateway: requests, errors and failover."""

import json
import re
from typing import Any, Literal

import grpc
import grpc.aio
import httpx
import openai
import pydantic
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = "the cat"
REGEX = "[a-z]{12} [0-9]{3}"
PLACE = {"type": "object", "properties": {"a": {"items": {"not": {"type": "null"}}}}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


class Answer(pydantic.BaseModel):
    kind: Literal["cat", "mat"]


def asking_for(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "seed": 4, "max_tokens": 200}


SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": REGEX}}, REGEX),
    ({"structured_outputs": {"regex": REGEX, "json": None}}, REGEX),
    ({"guided_regex": REGEX}, REGEX),
    ({"regex": REGEX}, REGEX),
    ({"guided_choice": ["cat", "mat"]}, "cat|mat"),
    ({"structured_outputs": {"choice": ["cat", "mat"]}}, "cat|mat"),
    ({"guided_grammar": 'start: "cat" | "mat"'}, "cat|mat"),
    ({"ebnf": 'root ::= "cat" | "mat"'}, "cat|mat"),
    ({"guided_json": {"enum": ["cat", 5]}}, '"cat"|5'),
    ({"guided_json": '{"enum": ["cat", 5]}'}, '"cat"|5'),
    ({"json_schema": '{"enum": ["cat", 5]}'}, '"cat"|5'),
    ({"structured_outputs": {"json": {"enum": ["cat", 5]}}}, '"cat"|5'),
    ({"response_format": {"type": "text"}, "regex": "cat"}, "cat"),
]


async def test_all_spellings_are_served_by_both_endpoints(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for fields, regex in SPELLINGS:
            body = asking_for(PROMPT) | fields
            answer = await client.post(f"{cluster.http_url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert re.fullmatch(regex, answer.json()["choices"][0]["message"]["content"])
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            plain = {"prompt": PROMPT, "seed": 4, "max_tokens": 200, **fields}
            answer = await client.post(f"{cluster.http_url}/v1/completions", json=plain)
            assert re.fullmatch(regex, answer.json()["choices"][0]["text"])


@pytest.mark.slow
async def test_the_openai_client_gets_and_parses_json(start_cluster: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with start_cluster(num_groups=1) as cluster:
        chats = cluster.openai.chat.completions
        answer = await chats.create(model="hash", response_format=form, **asking_for(PROMPT))
        found = json.loads(answer.choices[0].message.content)
        assert 0 <= found["n"] <= 99
        parsed = await chats.parse(model="hash", response_format=Answer, **asking_for(PROMPT))
        assert isinstance(parsed.choices[0].message.parsed, Answer)
        stream = await chats.create(
            model="hash", response_format=form, stream=True, **asking_for(PROMPT)
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert json.loads(text) == found
        any_object = {"type": "json_object"}
        answer = await chats.create(
            model="hash", response_format=any_object, **asking_for(PROMPT) | {"max_tokens": 20}
        )
        assert answer.choices[0].message.content.startswith("{")


PATTERNS = [f".*{'ab'[n % 2]}.{{{n}}}x.*" for n in range(22)]
TOGETHER = {"allOf": [{"allOf": [{"type": "string", "pattern": each}]} for each in PATTERNS]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PLACE}}},
        'response_format=json_schema at /properties/a/items: Unimplemented keys: ["not"]',
    ),
    ({"guided_json": "{"}, "json_schema"),
    ({"guided_regex": "("}, "regex"),
    ({"ebnf": "root ::= ("}, "grammar"),
    (
        {"guided_json": {"type": "integer", "multipleOf": 62_615_533}},
        "guided_json=json_schema: compiling it takes more than 1 s or 2 GiB",
    ),
    (
        {"guided_json": TOGETHER},
        "guided_json=json_schema: compiling it takes more than 1 s or 2 GiB",
    ),
    (
        {"guided_grammar": "start: A\nA: " + " & ".join(f"/{each}/" for each in PATTERNS)},
        "guided_grammar=grammar: ",
    ),
    (
        {"guided_json": {"properties": {"a": {"const": 0.9452706955539223}}}},
        "/properties/a/const: 0.9452706955539223 would not be written exactly: 15 digits are",
    ),
    ({"guided_choice": []}, "choice must be a list of texts"),
    ({"guided_choice": ["a"], "regex": "a"}, "guided_choice and regex are both given"),
    ({"structured_outputs": {}}, "exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "regex, choice"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern is n"),
    ({"structured_outputs": {"regex": 5}}, "not a text"),
    ({"structured_outputs": {"json": [5]}}, "a JSON schema is an object, not list"),
    ({"response_format": {"type": "json_schema"}}, "response_format="),
    (
        {"response_format": {"type": "xml"}},
        "must be text, json_object, json_schema or structural_tag",
    ),
    ({"regex": "a" * 600_000}, "600000 bytes: at most 524288"),
    ({"regex": "\ud800"}, "not JSON that can be read"),
]


@pytest.mark.slow
async def test_what_is_not_supported_is_refused_by_the_gateway(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for fields, words in REFUSED:
            for _ in range(2):  # The second time it is cached.
                answer = await client.post(
                    f"{cluster.http_url}/v1/chat/completions",
                    content=json.dumps(asking_for(PROMPT) | fields),
                    headers={"Content-Type": "application/json"},
                )
                assert answer.status_code == 400, (fields, answer.text)
                error = answer.json()["error"]
                assert words in error["message"], fields
                assert error["param"] in (None, *fields), error
        assert cluster.groups["g0"].executor.num_steps == 0


def generate(cluster: Any, **constraint: str) -> Any:
    params = pb.SamplingParams(
        seed=5, max_tokens=100, structured_outputs=pb.Constraint(**constraint)
    )
    return cluster.inference.Generate(pb.GenerateRequest(text=PROMPT, sampling=params))


async def test_grpc_clients_ask_for_it_too(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        chunks = [chunk async for chunk in generate(cluster, regex=REGEX)]
        assert re.fullmatch(REGEX, "".join(chunk.text for chunk in chunks))
        for constraint in ({}, {"regex": ""}, {"regex": "("}):
            with pytest.raises(grpc.aio.AioRpcError, match="structured_outputs") as raised:
                [chunk async for chunk in generate(cluster, **constraint)]
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_it_goes_on_exactly_when_its_group_is_killed(start_cluster: Any) -> None:
    regex = "([a-z]{3} ){10}(cat|mat|[0-9]{20})"
    async with start_cluster() as cluster:
        whole = [chunk async for chunk in generate(cluster, regex=regex)]
        cluster.take_steps_of(0.05)
        call = generate(cluster, regex=regex)
        chunks = aiter(call)
        begun = [await anext(chunks) for _ in range(5)]
        killed = cluster.groups[begun[0].start.routing.group]
        await killed.kill()
        cluster.take_steps_of(0)
        begun += [chunk async for chunk in call]
        assert cluster.gateway.telemetry.resumes._value.get() == 1
    tokens = [token for chunk in begun for token in chunk.token_ids]
    assert tokens == [token for chunk in whole for token in chunk.token_ids]
    text = "".join(chunk.text for chunk in begun)
    assert re.fullmatch(regex, text)
    assert text == "".join(chunk.text for chunk in whole)


async def test_a_group_that_cannot_compile_it_fails_that_request_alone(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_cluster(num_groups=1) as cluster:

        async def passes(*_: Any, **__: Any) -> None: ...

        monkeypatch.setattr(cluster.gateway.constraints, "check", passes)
        with pytest.raises(openai.BadRequestError, match="structured_outputs"):
            await cluster.openai.completions.create(
                model="hash", prompt=PROMPT, extra_body={"regex": "("}
            )
        answer = await cluster.openai.completions.create(
            model="hash", prompt=PROMPT, extra_body={"regex": "[a-z]{3}"}
        )
        assert re.fullmatch("[a-z]{3}", answer.choices[0].text)
        assert cluster.connections.num_ready == 1
