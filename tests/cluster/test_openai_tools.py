"""Tool calls and reasoning of a scripted model, as OpenAI's own client receives them."""

import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from tests.response_templates import CASES

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.formats import TOOL_FORMATS
from quire.worker.request.errors import ConfigError
from quire.worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

HERMES = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: Any = {
    "model": "hash",
    "messages": [{"role": "user", "content": "?"}],
    "tools": [WEATHER],
    "max_tokens": 200,
    "temperature": 0,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TWO_CALLS = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, model: Any) -> Any:
    """``says(text)`` scripts the model to answer a chat with the text and its end token."""

    def say(text: str) -> None:
        (start,) = model.tokenizer.encode("<|assistant|>")
        script = [*model.tokenizer.encode(text), model.eos]

        def next_token(context: Sequence[int], *, banned: Sequence[int] = (), **_: object) -> int:
            num_said = list(reversed(context)).index(start)
            return int(script[num_said])

        monkeypatch.setattr(model, "next_token", next_token)

    return say


async def collected(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_calls_and_reasoning_are_told_apart_from_content(
    start_cluster: Any, says: Any
) -> None:
    says(TWO_CALLS)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        answer = await cluster.openai.chat.completions.create(**ASKED, n=2)
        single = await cluster.openai.chat.completions.create(**ASKED, parallel_tool_calls=False)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.reasoning_content == choice.message.reasoning == "Hm."
        for call in choice.message.tool_calls:
            assert (call.type, call.function.name) == ("function", "weather")
            assert call.function.arguments == '{"city": "Ulm"}'
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    assert all(call_id.startswith("call_") for call_id in ids)
    assert len(single.choices[0].message.tool_calls) == 1


async def test_what_the_checkpoint_says_of_its_answers_is_served(
    start_cluster: Any, says: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["objects in a list"]
    monkeypatch.setattr(model.tokenizer, "response_template", case.template)
    says(case.write("Hm.", "I look.", [("weather", {"city": city}) for city in ("Ulm", "Köln")]))
    async with start_cluster(num_groups=1) as cluster:
        answer = await cluster.openai.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "I look.")
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
    assert arguments == [{"city": "Ulm"}, {"city": "Köln"}]


async def test_a_stream_says_the_same_a_little_at_a_time(start_cluster: Any, says: Any) -> None:
    says(TWO_CALLS)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        chunks = await collected(
            await cluster.openai.chat.completions.create(**ASKED, stream=True, logprobs=True)
        )
        async with cluster.openai.chat.completions.stream(**ASKED) as stream:
            final = await stream.get_final_completion()
    choices = [chunk.choices[0] for chunk in chunks]
    deltas = [choice.delta for choice in choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    thought = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thought) == "Hm."
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    calls: dict[int, Any] = {}
    for delta in deltas:
        for call in delta.tool_calls or []:
            if call.index not in calls:
                assert (call.type, call.function.name) == ("function", "weather")
                calls[call.index] = [call.id, ""]
            else:
                assert call.id is None
            calls[call.index][1] += call.function.arguments
    assert [arguments for _, arguments in calls.values()] == ['{"city": "Ulm"}'] * 2
    assert len({call_id for call_id, _ in calls.values()}) == 2
    script = cluster.model.tokenizer.encode(TWO_CALLS)
    told = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert len(told) == len(script) + 1  # And the end token.
    (choice,) = final.choices
    assert [call.function.arguments for call in choice.message.tool_calls] == [
        '{"city": "Ulm"}'
    ] * 2


async def test_an_answer_that_is_cut_off_keeps_what_there_is(start_cluster: Any, says: Any) -> None:
    says(TWO_CALLS)
    cut = TWO_CALLS[: TWO_CALLS.index("Ulm") + 1]
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        num_tokens = len(cluster.model.tokenizer.encode(cut))
        answer = await cluster.openai.chat.completions.create(**ASKED | {"max_tokens": num_tokens})
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "U'


async def test_calls_stay_text_where_none_may_be_made(start_cluster: Any, says: Any) -> None:
    says(CALL)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        none = await cluster.openai.chat.completions.create(**ASKED, tool_choice="none")
        no_tools = await cluster.openai.chat.completions.create(**ASKED | {"tools": []})
    unread = {"tool_call_parser": "none", "reasoning_parser": "none"}
    async with start_cluster(num_groups=1, config=unread) as cluster:
        raw = await cluster.openai.chat.completions.create(**ASKED)
    for answer in (none, no_tools, raw):
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
    assert none.usage.prompt_tokens == no_tools.usage.prompt_tokens < raw.usage.prompt_tokens


async def test_a_conversation_with_calls_reaches_the_template_whole(
    start_cluster: Any, says: Any
) -> None:
    says(CALL)
    async with start_cluster(num_groups=1, config=HERMES) as cluster:
        create = cluster.openai.chat.completions.create
        answer = await create(**ASKED)
        message = answer.choices[0].message
        call = message.tool_calls[0]
        asked = ASKED | {
            "messages": [
                *ASKED["messages"],
                message,
                {"role": "tool", "tool_call_id": call.id, "content": "rain"},
            ]
        }
        asked["max_tokens"] = 1
        answer = await create(**asked, extra_body={"return_token_ids": True})
        prompt = cluster.model.tokenizer.decode(
            answer.choices[0].prompt_token_ids, skip_special_tokens=False
        )
    shown = json.dumps(
        [
            {
                "id": call.id,
                "function": {"arguments": {"city": "Ulm"}, "name": "weather"},
                "type": "function",
            }
        ]
    )
    assert prompt == (
        f"<|system|>{json.dumps([WEATHER])}<|end|><|user|>?<|end|><|assistant|>{shown}<|end|>"
        f"<|tool|>rain{call.id}<|end|><|assistant|>"
    )


KIND = {
    "type": "object",
    "properties": {"k": {"enum": ["cat", 5]}},
    "required": ["k"],
    "additionalProperties": False,
}
FIND: Any = {"type": "function", "function": {"name": "find", "parameters": KIND}}
NAMED: Any = {"type": "function", "function": {"name": "find"}}
FREE = ASKED | {"tools": [FIND], "seed": 4, "parallel_tool_calls": False, "max_tokens": None}


@pytest.mark.slow
@pytest.mark.parametrize("form", [each.name for each in TOOL_FORMATS])
async def test_a_call_that_is_required_comes_in_every_format(start_cluster: Any, form: str) -> None:
    """From a model whose tokens are otherwise random."""
    async with start_cluster(
        num_groups=1, model_len=700, config={"tool_call_parser": form}
    ) as cluster:
        for choice in ("required", NAMED):
            answer = await cluster.openai.chat.completions.create(**FREE, tool_choice=choice)
            (found,) = answer.choices
            (call,) = found.message.tool_calls
            assert found.finish_reason == "tool_calls"
            assert call.function.name == "find"
            jsonschema.validate(json.loads(call.function.arguments), KIND)


@pytest.mark.slow
async def test_strict_tools_are_called_as_their_schemas_say(start_cluster: Any) -> None:
    class Find(pydantic.BaseModel):
        k: Literal["cat"]

    strict = openai.pydantic_function_tool(Find)
    async with start_cluster(
        num_groups=1, model_len=700, config={"tool_call_parser": "hermes"}
    ) as cluster:
        chats = cluster.openai.chat.completions
        asked = FREE | {"tools": [strict]}
        answer = await chats.parse(**asked, tool_choice="required")
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Find)
        free = await chats.create(**asked)
        assert free.choices[0].message.tool_calls is None
        assert free.choices[0].message.content
        form: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": KIND}}
        formed = (await chats.create(**asked, response_format=form)).choices[0].message
        (found,) = [each.function.arguments for each in formed.tool_calls or []] or [formed.content]
        assert json.loads(found)["k"] in ("cat", 5)
        with pytest.raises(openai.BadRequestError, match="a regex as the form of the output canno"):
            await chats.create(**asked, extra_body={"regex": "a"})
        odd = {"type": "object", "properties": {"a": {"not": {}}}}
        bad = {"type": "function", "function": {"name": "f", "parameters": odd}}
        with pytest.raises(openai.BadRequestError, match=r"tools: .*not"):
            await chats.create(**asked | {"tools": [bad]}, tool_choice="required")


@pytest.mark.slow
async def test_a_required_call_goes_on_exactly_when_its_group_is_killed(
    start_cluster: Any,
) -> None:
    async with start_cluster(model_len=700, config={"tool_call_parser": "hermes"}) as cluster:
        create = cluster.openai.chat.completions.create
        asked = {**FREE, "tool_choice": "required", "stream": True}
        whole = await collected(await create(**asked))
        cluster.take_steps_of(0.05)
        stream = aiter(await create(**asked))
        chunks = [await anext(stream) for _ in range(3)]
        (victim,) = [group for group in cluster.groups.values() if group.engine_loop.num_requests]
        await victim.kill()
        cluster.take_steps_of(0)
        chunks += [chunk async for chunk in stream]
        assert cluster.gateway.telemetry.resumes._value.get() == 1
    said, expected = (
        [call.function for chunk in each for call in chunk.choices[0].delta.tool_calls or []]
        for each in (chunks, whole)
    )
    assert said[0].name == expected[0].name == "find"
    arguments = "".join(function.arguments for function in said)
    assert arguments == "".join(function.arguments for function in expected)
    ids = [
        call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.id
    ]
    assert len(ids) == 1


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer._backend, chat_template=template)


@pytest.mark.quick_cells(6)
@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<tool_call> {{ tools }} </think>", "hermes", "think"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder", None),
        ("<tool_call><arg_key></think>", "glm45", "think"),
        ("[TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS][ARGS][THINK]", "mistral_v11", "mistral"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ('{"name": function name, "parameters": dictionary', "llama3_json", None),
        ("[func_name1(params_name1=params_value1", "pythonic", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("'<|tool_call>call:' '<|\"|>' part.split('<channel|>') '<|channel>'", "gemma4", "gemma4"),
        ("respond only with <|tool_call|> followed by a JSON list", "granite", None),
        ("{{ messages[0].content }}", None, None),
    ],
)
def test_the_chat_template_tells_the_format(
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    template: str,
    calls: str | None,
    reasoning: str | None,
) -> None:
    source = "{% raw %}" + template + "{% endraw %}"
    with caplog.at_level(logging.INFO):
        dialect = choose_dialect(with_template(tokenizer, source))
    assert (dialect.calls.name if dialect.calls else None) == calls
    assert (dialect.reasoning.name if dialect.reasoning else None) == reasoning
    told = caplog.text
    assert f"read as {calls}: the chat template has" in told if calls else "none are read" in told


def test_a_format_that_is_not_known_is_refused_with_those_that_are(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="tool_call_parser='x': must be one of auto, none, deeps"):
        choose_dialect(tokenizer, tool_call_parser="x")
    with pytest.raises(ConfigError, match="reasoning_parser='x': must be one of auto, none, mist"):
        choose_dialect(tokenizer, reasoning_parser="x")


def test_special_tokens_that_mark_are_shown_to_the_parser(tokenizer: Tokenizer) -> None:
    backend = type(tokenizer._backend).from_str(tokenizer._backend.to_str())
    backend.add_special_tokens(["[TOOL_CALLS]", "[THINK]", "[/THINK]", "[OTHER]"])
    marked = Tokenizer(backend, chat_template="[TOOL_CALLS][THINK]")
    dialect = choose_dialect(marked)
    ids = {name: marked.encode(name)[0] for name in ("[TOOL_CALLS]", "[THINK]", "[/THINK]")}
    assert dialect.shown_token_ids(with_calls=True) == set(ids.values())
    assert dialect.shown_token_ids(with_calls=False) == {ids["[THINK]"], ids["[/THINK]"]}
