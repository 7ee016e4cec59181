"""``/v1/responses`` through OpenAI's own client."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response
from tests.cluster.test_openai_tools import CALL, HERMES, TWO_CALLS, collected, says

from quire.cluster.features.responses.input import turns_of
from quire.cluster.features.responses.schema import ResponsesBody

pytestmark = pytest.mark.anyio
__all__ = ["says"]  # A fixture.

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
ASKED: Any = {"model": "hash", "input": "?", "temperature": 0}
TOLD = {**ASKED, "tools": [WEATHER]}


def checked(response: Any) -> Any:
    """``response``, after checking every field against the client's types."""
    return Response.model_validate(response.model_dump(mode="json", by_alias=True))


async def test_a_text_is_answered_as_a_chat_answers_it(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        client = cluster.openai
        chat = await client.chat.completions.create(
            model="hash",
            messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "?"}],
            max_tokens=9,
            temperature=0,
            seed=3,
        )
        asked = {"instructions": "s", "max_output_tokens": 9, "extra_body": {"seed": 3}}
        metadata = {"a": "b"}
        answer = checked(await client.responses.create(**ASKED, **asked, metadata=metadata))
        again = await client.responses.create(**ASKED, **asked, store=True)
    text = chat.choices[0].message.content
    assert answer.output_text == again.output_text == text
    assert answer.id.startswith("resp_")
    assert answer.object == "response"
    assert (answer.status, chat.choices[0].finish_reason) == ("incomplete", "length")
    assert answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert item.status == "incomplete"
    assert item.id.startswith("msg_")
    assert item.id != again.output[0].id
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens == 9
    assert answer.usage.total_tokens == chat.usage.total_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0, 1, 9)
    assert (answer.instructions, answer.metadata) == ("s", {"a": "b"})
    assert answer.tool_choice == "auto"
    assert answer.model_extra["store"] is False


async def test_reasoning_text_and_calls_are_items(start_cluster: Any, says: Any) -> None:
    says(TWO_CALLS)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        create = cluster.openai.responses.create
        answer = checked(await create(**TOLD))
        single = await create(**TOLD, parallel_tool_calls=False)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in answer.output] == kinds
    assert [item.type for item in single.output] == kinds[:3]
    reasoning, message, *calls = answer.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == answer.output_text == "I look."
    for call in calls:
        assert (call.name, call.status) == ("weather", "completed")
        assert json.loads(call.arguments) == {"city": "Ulm"}
    assert len({item.id for item in answer.output}) == 4
    assert answer.status == "completed"
    assert answer.tools[0].model_dump(exclude_none=True) == WEATHER


async def test_a_stream_tells_of_each_item_from_its_beginning_to_its_end(
    start_cluster: Any, says: Any
) -> None:
    says(TWO_CALLS)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        whole = await cluster.openai.responses.create(**TOLD)
        events = await collected(await cluster.openai.responses.create(**TOLD, stream=True))
        async with cluster.openai.responses.stream(**TOLD) as stream:
            final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    runs = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    expected = ["created", "in_progress"]
    for kind in ["reasoning_text", "output_text", *["function_call_arguments"] * 2]:
        is_part = kind != "function_call_arguments"
        expected += ["output_item.added", *(["content_part.added"] if is_part else [])]
        expected += [f"{kind}.delta", f"{kind}.done"]
        expected += [*(["content_part.done"] if is_part else []), "output_item.done"]
    assert runs == [*expected, "completed"]
    for kind, field in [
        ("reasoning_text", "text"),
        ("output_text", "text"),
        ("function_call_arguments", "arguments"),
    ]:
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        dones = [event for event in events if event.type == f"response.{kind}.done"]
        assert "".join(deltas) == "".join(getattr(done, field) for done in dones)
    items = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [item.id for item in items]
    assert {item.status for item in added} == {"in_progress"}
    response = checked(events[-1].response)
    assert [item.model_dump() for item in items] == [item.model_dump() for item in response.output]
    assert events[0].response.id == response.id
    assert events[0].response.output == []
    assert response.usage.output_tokens == whole.usage.output_tokens
    for answer in (response, final):
        assert [each.type for each in answer.output] == [each.type for each in whole.output]
        assert answer.output_text == whole.output_text


async def test_every_event_is_named_on_the_wire(start_cluster: Any) -> None:
    body = {"input": "?", "max_output_tokens": 3, "stream": True}
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{cluster.http_url}/v1/responses", json=body)
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize(
    ("said", "cut"),
    [
        (TWO_CALLS, "<think>\nH"),
        ("I look.", "I loo"),
        (CALL + CALL, '<tool_call>\n{"name": "weather", "arguments": {"city": "U'),
    ],
)
async def test_what_is_cut_off_is_incomplete(
    start_cluster: Any, says: Any, said: str, cut: str
) -> None:
    says(said)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        asked = {**TOLD, "max_output_tokens": len(cluster.model.tokenizer.encode(cut))}
        whole = await cluster.openai.responses.create(**asked)
        events = await collected(await cluster.openai.responses.create(**asked, stream=True))
    assert events[-1].type == "response.incomplete"
    for answer in (whole, events[-1].response):
        assert (answer.status, answer.error) == ("incomplete", None)
        assert [item.status for item in answer.output] == ["incomplete"]
    (item,) = whole.output
    assert item.type != "function_call" or item.arguments == '{"city": "U'


async def test_a_conversation_has_the_tokens_that_it_has_as_a_chat(
    start_cluster: Any, says: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(TWO_CALLS)
    prompts: list[Sequence[int]] = []
    async with start_cluster(num_groups=1, model_len=900, config=HERMES) as cluster:
        run = cluster.gateway.run

        def watched(prepared: Any, take: Any, **more: Any) -> Any:
            prompts.append(prepared[0].prompt_token_ids.tolist())
            return run(prepared, take, **more)

        monkeypatch.setattr(cluster.gateway, "run", watched)
        client = cluster.openai
        answer = await client.responses.create(**TOLD)
        calls = [item for item in answer.output if item.type == "function_call"]
        said: list[Any] = ["rain", [{"type": "input_text", "text": "sun"}]]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in zip(calls, said, strict=True)
        ]
        parts = [{"type": "input_text", "text": "and "}, {"type": "input_text", "text": "now"}]
        start: Any = [{"role": "developer", "content": "d"}, {"role": "user", "content": "?"}]
        last = {"role": "user", "content": parts}
        items: Any = [*start, *answer.output, *outputs, last]
        await client.responses.create(**TOLD | {"input": items, "max_output_tokens": 1})
        shown = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
        messages: Any = [
            {"role": "system", "content": "d"},
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Hm.",
                "tool_calls": shown,
            },
            {"role": "tool", "tool_call_id": calls[0].call_id, "content": "rain"},
            {"role": "tool", "tool_call_id": calls[1].call_id, "content": "sun"},
            {"role": "user", "content": "and now"},
        ]
        function = {name: WEATHER[name] for name in ("name", "parameters")}
        tools: Any = [{"type": "function", "function": function}]
        await client.chat.completions.create(
            model="hash", messages=messages, tools=tools, max_tokens=1
        )
    assert prompts[1] == prompts[2]
    assert "rain" in model.tokenizer.decode(prompts[1])


class Kind(pydantic.BaseModel):
    k: Literal["cat", "mat"]


@pytest.mark.slow
async def test_forms_are_kept(start_cluster: Any) -> None:
    async with start_cluster(
        num_groups=1, model_len=700, config={"tool_call_parser": "hermes"}
    ) as cluster:
        responses = cluster.openai.responses
        parsed = await responses.parse(**ASKED, text_format=Kind)
        async with responses.stream(**ASKED, text_format=Kind) as stream:
            streamed = await stream.get_final_response()
        assert isinstance(parsed.output_parsed, Kind)
        assert isinstance(streamed.output_parsed, Kind)
        tool: Any = openai.pydantic_function_tool(Kind, name="find")["function"]
        named: Any = {"type": "function", "name": "find"}
        for choice in ("required", named):
            answer = await responses.create(
                **ASKED, tools=[{"type": "function", **tool}], tool_choice=choice
            )
            call = answer.output[0]
            assert call.type == "function_call"
            Kind.model_validate_json(call.arguments)
        regex = {"structured_outputs": {"regex": "zzy"}}
        assert (await responses.create(**ASKED, extra_body=regex)).output_text == "zzy"


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
    ({"conversation": "c"}, "conversation", "send the earlier items in input"),
    ({"background": True}, "background", "wait for the answer or stream it"),
    ({"include": ["file_search_call.results"]}, "include", "is not supported: leave it out"),
    ({"truncation": "last"}, "truncation", "is not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "is not supported"),
    ({"service_tier": "free"}, "service_tier", "is not supported"),
    (
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options",
        "not supported",
    ),
    ({"n": 2}, "n", "n=2 is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "send text={'format': …}"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "send reasoning={'effort': …}"),
    ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0: "),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema or structural_tag"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "JSON schema"),
    ({"text": {"formt": {}}}, "formt", "did you mean format?"),
    ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort='huge'"),
    ({"metadata": {"a": "b" * 600}}, "metadata", "at most 16 keys"),
    (
        {"tools": [WEATHER | {"defer_loading": True}]},
        "tools[0]",
        "tools[0]: defer_loading=True is not",
    ),
    ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice", '{"type": "function", "name": …}'),
    ({"tools": [WEATHER], "tool_choice": {"type": "web"}}, "tool_choice", "must be 'auto', 'none'"),
    ({"input": []}, "input", "input is empty"),
    ({"input": 5}, "input", "input=5"),
    (
        {"input": [{"content": "x"}]},
        "input[0].role",
        "input[0].role: an item of type 'message' must have it",
    ),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "store=False"),
    (
        {"input": [{"type": "mcp_list_tools"}]},
        "input[0]",
        "input[0]: an item of type 'mcp_list_tools'",
    ),
    (
        {"input": [{"role": "robot", "content": "x"}]},
        "input[0].role",
        "input[0].role='robot': must be user, assistant, system, developer",
    ),
    (
        {"tools": [{"type": "local_shell"}]},
        "tools[0]",
        "tools[0]: type='local_shell' is not supported, the model would not see the tool",
    ),
    (
        {"tools": [{"type": "namespace", "name": "mcp", "tools": [WEATHER]}]},
        "tools[0]",
        "type='namespace' is not supported",
    ),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]", "encrypted_content"),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
        "call_id",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        "'input_image' is not supported: this model reads text, send parts of type 'input_text'",
    ),
]


async def test_what_is_not_served_is_refused_by_name(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/responses"
        for body, param, words in BAD:
            answer = await client.post(url, json={"input": "x", "max_output_tokens": 1, **body})
            error = answer.json()["error"]
            assert answer.status_code == 400, body
            assert (error["type"], error["param"]) == ("invalid_request_error", param), error
            assert words in error["message"]
        neutral = {
            **{"background": False, "include": [], "truncation": "disabled", "top_logprobs": 0},
            **{"service_tier": "auto", "previous_response_id": None, "user": "me", "store": True},
            **{"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"}},
            **{"stream_options": {"include_obfuscation": True}, "stream": True},
            **{"truncation": "auto", "service_tier": "flex", "max_tool_calls": 4},
        }
        body = {"input": "x", "max_output_tokens": 1, **neutral}
        assert (await client.post(url, json=body)).status_code == 200
        encrypted = {**body, "include": ["reasoning.encrypted_content"]}
        assert (await client.post(url, json=encrypted)).status_code == 200
        reference = (await client.get(f"{cluster.http_url}/openapi.json")).json()
    fields = reference["components"]["schemas"]["ResponsesBody"]["properties"]
    assert {"input", "text", "top_k"} <= fields.keys()
    assert not {"n", "response_format", "reasoning_effort"} & fields.keys()


async def test_a_custom_tool_takes_one_text(start_cluster: Any, says: Any) -> None:
    tool: Any = {"type": "custom", "name": "weather", "description": "Of a city."}
    says(CALL.replace("city", "input"))
    async with start_cluster(num_groups=1, model_len=900, config=HERMES) as cluster:
        create = cluster.openai.responses.create
        answer = checked(await create(**ASKED, tools=[tool]))
        events = await collected(await create(**ASKED, tools=[tool], stream=True))
        (call,) = answer.output
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "rain"}
        items: Any = [{"role": "user", "content": "?"}, call, output]
        again = {"input": items, "max_output_tokens": 1, "tools": [tool]}
        assert (await create(**{**ASKED, **again})).status == "incomplete"
    assert (call.type, call.name, call.input, call.status) == (
        *("custom_tool_call", "weather", "Ulm"),
        "completed",
    )
    assert answer.tools[0].type == "custom"
    told = [event for event in events if "custom_tool_call_input" in event.type]
    assert [getattr(event, "delta", None) or event.input for event in told] == ["Ulm", "Ulm"]


def test_other_items_of_a_history_are_calls_or_text() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "q"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": "x"},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "y"}]},
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": "!"},
    ]
    asked = ResponsesBody.model_validate({"input": items})
    messages = [turn.message() for turn in turns_of(None, asked.input)]
    shown = [
        (each["role"], each["content"], *(call["function"] for call in each.get("tool_calls", ())))
        for each in messages
    ]
    assert shown == [
        ("user", "?"),
        (
            "assistant",
            '[web_search: {"action": {"query": "q"}}]',
            {"name": "apply_patch", "arguments": '{"input": "a \\"b\\""}'},
        ),
        ("tool", "done"),
        (
            "assistant",
            None,
            {"name": "local_shell", "arguments": '{"action": {"command": ["ls"]}}'},
        ),
        ("tool", "x"),
        ("assistant", None, {"name": "shell", "arguments": '{"action": {"commands": ["ls"]}}'}),
        ("tool", '[{"stdout": "y"}]'),
        ("system", "d"),
        ("assistant", "!"),
    ]


async def test_a_stream_that_fails_says_so_with_what_there_is(
    start_cluster: Any, says: Any
) -> None:
    says("abcz")
    async with start_cluster(num_groups=1) as cluster:
        (poison,) = cluster.model.tokenizer.encode("c")
        cluster.groups["g0"].executor.breaks_at = poison
        with pytest.raises(openai.InternalServerError, match="NaN"):
            await cluster.openai.responses.create(**ASKED)
        events = await collected(await cluster.openai.responses.create(**ASKED, stream=True))
    failed = events[-1]
    assert failed.type == "response.failed"
    response = checked(failed.response)
    assert response.status == "failed"
    assert response.error.code == "server_error"
    assert "NaN or infinite logits" in response.error.message
    assert response.output_text == "abc"
