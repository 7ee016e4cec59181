"""Request bodies of coding agents are served as far as possible; ignored parts are reported."""

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
from tests.cluster.test_openai_tools import HERMES

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CLAUDE_CODE: dict[str, Any] = {
    "model": "hash",
    "max_tokens": 8,
    "stream": False,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "system", "content": "The folder is empty."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
CODEX: dict[str, Any] = {
    "model": "hash",
    "max_output_tokens": 8,
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "", "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": False},
        {
            **{"type": "custom", "name": "apply_patch", "description": "Edits files."},
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "namespace", "name": "mcp", "tools": []},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "c",
    "text": {"verbosity": "low"},
    "client_metadata": {"installation": "i"},
}


async def test_agents_are_served_and_told_what_is_left_out(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1, model_len=700, config=HERMES) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        for path, body, ignored in (
            ("/v1/messages", CLAUDE_CODE, "context_management, tools[1]"),
            (
                "/v1/responses",
                CODEX,
                "client_metadata, text.verbosity, tools[1], tools[2].format, tools[3]",
            ),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Ignored-Fields"] == ignored
            streamed = await client.post(path, json=body | {"stream": True})
            assert streamed.headers["X-Ignored-Fields"] == ignored
        chat = {"model": "hash", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        asks_nothing = {"store": False, "prompt_cache_key": "c"}
        answer = await client.post("/v1/chat/completions", json=chat | asks_nothing)
        assert "X-Ignored-Fields" not in answer.headers
        answer = await client.post("/v1/chat/completions", json=chat | {"store": True})
        assert answer.headers["X-Ignored-Fields"] == "store"


async def test_the_system_may_speak_among_anthropics_messages(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        hello = [{"role": "user", "content": "?"}]
        asked = {"max_tokens": 8, "temperature": 0, "seed": 1, "messages": hello}
        merged = await client.post("/v1/messages", json=asked | {"system": "a\n\nb"})
        turns = [{"role": "system", "content": "b"}, *hello]
        apart = await client.post("/v1/messages", json=asked | {"system": "a", "messages": turns})
    assert apart.json()["content"] == merged.json()["content"]
    assert apart.json()["usage"]["cache_read_input_tokens"] > 0  # The prompts are equal.


async def test_values_by_which_clients_mean_none_or_greedy(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        asked = {"prompt": "the cat", "max_tokens": 12, "seed": 1}

        async def text(**more: object) -> str:
            answer = await client.post("/v1/completions", json=asked | more)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        assert await text(top_p=0, temperature=1) == await text(temperature=0)
        await text(seed=-1)
        for seed in (-2, 2**63):
            answer = await client.post("/v1/completions", json=asked | {"seed": seed})
            assert answer.json()["error"]["param"] == "seed"
        chat = {"messages": [{"role": "user", "content": "?"}]}
        for name in ("max_tokens", "max_completion_tokens"):
            answer = await client.post("/v1/chat/completions", json=chat | {name: -2})
            assert answer.json()["error"]["param"] == name
            answer = await client.post("/v1/chat/completions", json=chat | {name: -1})
            assert answer.json()["usage"]["completion_tokens"] > 16
        hints = {
            **{"service_tier": "flex", "provider": {"order": ["x"]}, "usage": {"include": True}},
            **{"cache_prompt": True, "keep_alive": "5m", "stream": True},
            "stream_options": {"include_usage": None, "include_obfuscation": True},
        }
        answer = await client.post("/v1/chat/completions", json=chat | hints | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text
        for path in ("/v1/models", "/v1/models/"):
            listed = (await client.get(path)).json()
            assert [each["id"] for each in listed["data"]] == ["hash"]


async def test_a_packed_body_is_read_within_the_bounds_of_a_plain_one(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        plain = json.dumps(
            {"prompt": "the cat", "max_tokens": 3, "temperature": 0, "seed": 1}
        ).encode()

        async def post(content: bytes, encoding: str) -> httpx.Response:
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            return await client.post("/v1/completions", content=content, headers=headers)

        wanted = (await post(plain, "identity")).json()["choices"]
        assert (await post(gzip.compress(plain), "gzip")).json()["choices"] == wanted
        assert (await post(zlib.compress(plain), "deflate")).json()["choices"] == wanted
        bomb = gzip.compress(b'{"prompt": "' + bytes(64 << 20))
        assert len(bomb) < 2**17
        assert (await post(bomb, "gzip")).status_code == 413
        for content, encoding, status in (
            (plain, "gzip", 400),
            (gzip.compress(plain)[:-20], "gzip", 400),
            (plain, "br", 415),
        ):
            assert (await post(content, encoding)).status_code == status
