"""``/v1/messages`` through Anthropic's own client."""

from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from tests.cluster.test_openai_tools import HERMES, TWO_CALLS, collected, says

from quire.cluster.edge.auth import ApiKeys
from quire.cluster.features.anthropic.input import turns_of
from quire.cluster.features.anthropic.schema import MessagesBody

pytestmark = pytest.mark.anyio
__all__ = ["says"]  # A fixture.

PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "input_schema": PARAMETERS}
HELLO: Any = {"role": "user", "content": "?"}
ASKED: Any = {
    "model": "hash",
    "messages": [HELLO],
    "max_tokens": 200,
    "extra_body": {"temperature": 0, "seed": 1},
}
TOLD: Any = {**ASKED, "tools": [WEATHER]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@asynccontextmanager
async def client_of(cluster: Any, key: str = "none") -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=cluster.http_url, api_key=key, max_retries=0
    ) as client:
        yield client


async def test_a_text_is_answered_as_a_chat_answers_it(start_cluster: Any) -> None:
    system: Any = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
    chat_messages: Any = [{"role": "system", "content": "s"}, HELLO]
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    async with start_cluster(num_groups=1) as cluster, client_of(cluster) as client:
        chat = await cluster.openai.chat.completions.create(
            model="hash", messages=chat_messages, temperature=0, seed=1, max_tokens=9
        )
        asked = {**ASKED, "max_tokens": 9, "metadata": {"user_id": "u"}}
        plain = await client.messages.create(**asked, system="s")
        again = await client.messages.create(**{**asked, "messages": blocks}, system=system)
        counted = await client.messages.count_tokens(model="hash", messages=[HELLO], system=system)
        async with client.messages.stream(**asked, system="s") as stream:
            texts = await collected(stream.text_stream)
            final = await stream.get_final_message()
    text = chat.choices[0].message.content
    assert text
    assert "".join(texts) == text
    for answer in (plain, again, final):
        (block,) = answer.content
        assert (block.type, block.text) == ("text", text)
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", "hash")
        assert answer.id.startswith("msg_")
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        usage = answer.usage
        assert usage.output_tokens == chat.usage.completion_tokens == 9
        num_read = usage.input_tokens + usage.cache_read_input_tokens
        assert num_read == chat.usage.prompt_tokens == counted.input_tokens
    assert again.usage.cache_read_input_tokens > 0


async def test_thinking_text_and_calls_are_blocks(start_cluster: Any, says: Any) -> None:
    says(TWO_CALLS)
    async with start_cluster(num_groups=1, config=HERMES) as cluster, client_of(cluster) as client:
        answer = await client.messages.create(**TOLD)
        single = await client.messages.create(
            **TOLD, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        async with client.messages.stream(**TOLD) as stream:
            final = await stream.get_final_message()
        events = await collected(await client.messages.create(**TOLD, stream=True))
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [block.type for block in answer.content] == kinds
    assert [block.type for block in final.content] == kinds
    assert [block.type for block in single.content] == kinds[:3]
    for message in (answer, final):
        thinking, text, *calls = message.content
        assert (thinking.thinking, text.text) == ("Hm.", "I look.")
        assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Ulm"})] * 2
        assert len({call.id for call in calls}) == 2
        assert message.stop_reason == "tool_use"
    assert final.usage.output_tokens == answer.usage.output_tokens
    names = [event.type for event in events]
    runs = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    block_names = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", *block_names * 4, "message_delta", "message_stop"]
    kinds_of_deltas = {event.delta.type for event in events if event.type == block_names[1]}
    assert kinds_of_deltas == {"thinking_delta", "text_delta", "input_json_delta"}


async def test_a_conversation_has_the_tokens_that_it_has_as_a_chat(
    start_cluster: Any, says: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(TWO_CALLS)
    prompts: list[Sequence[int]] = []
    async with (
        start_cluster(num_groups=1, model_len=900, config=HERMES) as cluster,
        client_of(cluster) as client,
    ):
        run = cluster.gateway.run

        def watched(prepared: Any, take: Any, **more: Any) -> Any:
            prompts.append(prepared[0].prompt_token_ids.tolist())
            return run(prepared, take, **more)

        monkeypatch.setattr(cluster.gateway, "run", watched)
        answer = await client.messages.create(**TOLD)
        calls = answer.content[2:]
        results: Any = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1].id,
                "content": [{"type": "text", "text": "sun"}],
                "is_error": False,
            },
            {"type": "text", "text": "and "},
            {"type": "text", "text": "now"},
        ]
        told: Any = {"role": "assistant", "content": answer.content}
        messages: Any = [HELLO, told, {"role": "user", "content": results}]
        await client.messages.create(**{**TOLD, "messages": messages, "max_tokens": 1})
        counted = await client.messages.count_tokens(
            model="hash", messages=messages, tools=[WEATHER]
        )
        shown = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
            }
            for call in calls
        ]
        chat: Any = [
            HELLO,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Hm.",
                "tool_calls": shown,
            },
            {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"},
            {"role": "tool", "tool_call_id": calls[1].id, "content": "sun"},
            {"role": "user", "content": "and now"},
        ]
        create = cluster.openai.chat.completions.create
        await create(model="hash", messages=chat, tools=CHAT_TOOLS, max_tokens=1)
        begun: Any = [HELLO, {"role": "assistant", "content": "I lo"}]
        await client.messages.create(**{**ASKED, "messages": begun, "max_tokens": 1})
        more = {"add_generation_prompt": False, "continue_final_message": True}
        await create(model="hash", messages=begun, max_tokens=1, extra_body=more)
        for kind, effort in [("disabled", {"reasoning_effort": "none"}), ("adaptive", {})]:
            thinking = {"thinking": {"type": kind}}
            await client.messages.create(**ASKED | {"extra_body": thinking, "max_tokens": 1})
            await create(model="hash", messages=[HELLO], max_tokens=1, **effort)
    assert prompts[1::2] == prompts[2::2]
    assert counted.input_tokens == len(prompts[1])
    assert "rain" in model.tokenizer.decode(prompts[1])


async def test_a_stop_sequence_is_named(start_cluster: Any, says: Any) -> None:
    says("I look around.")
    async with start_cluster(num_groups=1) as cluster, client_of(cluster) as client:
        ended = await client.messages.create(**ASKED)
        stopped = await client.messages.create(**ASKED, stop_sequences=["zzz", " aro"])
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " aro")
    assert stopped.content[0].text == "I look"


@pytest.mark.slow
async def test_a_call_is_made_where_it_must_be(start_cluster: Any) -> None:
    schema = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]}
    tool: Any = {
        "type": "custom",
        "name": "find",
        "input_schema": {**schema, "additionalProperties": False},
    }
    choices: list[Any] = [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "find"},
    ]
    async with (
        start_cluster(
            num_groups=1, model_len=700, config={"tool_call_parser": "hermes"}
        ) as cluster,
        client_of(cluster) as client,
    ):
        for choice in choices:
            answer = await client.messages.create(**ASKED, tools=[tool], tool_choice=choice)
            (call,) = answer.content
            assert (call.type, call.name) == ("tool_use", "find")
            assert call.input["k"] in ("a", "b")
        none = await client.messages.create(
            **{**ASKED, "max_tokens": 3}, tools=[tool], tool_choice={"type": "none"}
        )
    assert [block.type for block in none.content] == ["text"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages is empty"),
    ({"messages": 5}, "messages=5"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "must be user, assistant, system"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "name='n' is not supported"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: a block of"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]},
        "a=1 is not supported",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "i", "content": [IMAGE]}],
                }
            ]
        },
        "type 'image' is not supported",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {}}],
                }
            ]
        },
        "send its tool_result",
    ),
    ({"system": [IMAGE]}, "system[0]: a block of type 'image'"),
    ({"tools": [{"name": "w"}]}, "input_schema=None"),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "type='bash_20250124' is not supported",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "i",
                            "content": [{"type": "text", "text": "x", "cache_control": 5}],
                        }
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0].cache_control=5: must be of type 'ephemeral'",
    ),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "defer_loading=True"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "must be an object of type 'auto'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "it is not in tools"),
    ({"tool_choice": {"type": "any"}}, "only allowed with tools"),
    ({"thinking": {"type": "on"}}, "thinking.type='on'"),
    ({"thinking": {"type": "enabled", "budget_token": 5}}, "did you mean budget_tokens?"),
    ({"stop": "x"}, "send stop_sequences"),
    ({"n": 2}, "n=2 is not supported"),
    ({"max_tokns": 2}, "did you mean max_tokens?"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"top_p": 7}, "top_p=7"),
]


def test_consecutive_turns_of_a_user_are_one() -> None:
    result = {"type": "tool_result", "tool_use_id": "i", "content": "r"}
    turns: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "there"}]},
        {"role": "user", "content": [result, {"type": "text", "text": "a"}]},
        {"role": "user", "content": []},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": []},
    ]
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": turns})
    messages = [(turn.role, turn.content) for turn in turns_of((), body.messages)]
    shown = [("user", "Hithere"), ("tool", "r"), ("user", "ab"), ("assistant", "!"), ("user", "")]
    assert messages == shown


async def test_errors_are_in_anthropics_words(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        client_of(cluster) as client,
        httpx.AsyncClient(timeout=None) as plain,
    ):
        url = f"{cluster.http_url}/v1/messages"
        for body, words in BAD:
            answer = await plain.post(url, json={"messages": [HELLO], "max_tokens": 1, **body})
            said = answer.json()
            assert answer.status_code == 400, body
            assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
            assert said["error"].keys() == {"type", "message"}
            assert words in said["error"]["message"]
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**ASKED, "model": "other"})
        wrong = await plain.get(url)
        reference = (await plain.get(f"{cluster.http_url}/openapi.json")).json()
    refusal: Any = missing.value.body
    assert refusal["error"]["type"] == "not_found_error"
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    fields = reference["components"]["schemas"]["MessagesBody"]["properties"]
    assert {"messages", "system", "stop_sequences", "thinking"} <= fields.keys()
    assert not {"n", "stop", "reasoning_effort"} & fields.keys()
    assert "/v1/messages/count_tokens" in reference["paths"]


async def _read(stream: Any, said: list[str]) -> None:
    async for event in stream:
        said += [event.delta.text] if event.type == "content_block_delta" else []


async def test_a_stream_that_fails_says_so(start_cluster: Any, says: Any) -> None:
    says("abcz")
    async with start_cluster(num_groups=1) as cluster, client_of(cluster) as client:
        (poison,) = cluster.model.tokenizer.encode("c")
        cluster.groups["g0"].executor.breaks_at = poison
        with pytest.raises(anthropic.InternalServerError, match="NaN"):
            await client.messages.create(**ASKED)
        said: list[str] = []
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="NaN or infinite logits"):
            await _read(stream, said)
    assert "".join(said) == "abc"


async def test_the_key_may_come_in_anthropics_header(start_cluster: Any) -> None:
    keys = ApiKeys.of_token("right")
    async with start_cluster(num_groups=1, keys=keys) as cluster:
        async with client_of(cluster, "right") as client:
            answer = await client.messages.create(**{**ASKED, "max_tokens": 1})
        async with anthropic.AsyncAnthropic(
            base_url=cluster.http_url, auth_token="right", max_retries=0
        ) as client:
            await client.messages.create(**{**ASKED, "max_tokens": 1})
        async with client_of(cluster, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**ASKED)
    assert answer.usage.output_tokens == 1
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"
