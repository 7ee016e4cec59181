"""An answer that a client sends back in the next turn is accepted and renders to the same text, at
every endpoint and in every way in which a client may have received it."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest
from tests.cluster.test_openai_tools import HERMES, collected

from quire.worker.text.tokenizer import Tokenizer
from quire_client import AsyncClient, Chat, SamplingParams

pytestmark = pytest.mark.anyio

# Templates render arguments in three ways: as JSON, one by one, and joined to other text. A result
# is rendered with the name of the call that has its id.
TEMPLATE = """
{%- for m in messages %}<|{{ m.role }}|>
    {%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {%- if m.role == 'tool' %}
        {%- for each in messages %}{% for c in each.tool_calls or [] %}
            {%- if c.id == m.tool_call_id %}{{ c.function.name + ': ' }}{% endif %}
        {%- endfor %}{% endfor %}
    {%- endif %}{{ m.content }}
    {%- for c in m.tool_calls or [] %}
        {%- set arguments = c.function.arguments %}
        {{- '<tool_call>' + c.function.name + ' ' + (arguments | tojson) + ' ' }}
        {%- for key, value in arguments | items %}{{ key }}={{ value }};{% endfor %}
        {{- ' ' + arguments + '</tool_call>' }}
    {%- endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% elif continue_final_message is not defined %}?
{%- endif %}"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's text, the place where it is cut, and the parts that a client must receive."""

    text: str
    cut: str = ""
    stop: str = ""
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    prefill: str = ""
    is_json: bool = False


def call(arguments: str = '{"city": "Ulm"}', name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


THOUGHT = "<think>\nHm.\n</think>\n\n"
ULM = ("weather", '{"city": "Ulm"}')
CUT = ("weather", '{"city": "U')
CALL = call()
CASES = {
    "text": Case(text="I look.", content="I look."),
    "nothing": Case(text=""),
    "space": Case(text=" \n I look. \n", content=" \n I look. \n"),
    "odd characters": Case(text='é☂𝄞 "\\n" {{ x }} {%', content='é☂𝄞 "\\n" {{ x }} {%'),
    "cut text": Case(text="I look.", cut="I lo", content="I lo"),
    "reasoning": Case(text=f"{THOUGHT}So.", reasoning="Hm.", content="So."),
    "cut reasoning": Case(text=THOUGHT, cut="<think>\nH", reasoning="H"),
    "reasoning alone": Case(text=THOUGHT, reasoning="Hm."),
    "a call": Case(text=CALL, calls=[ULM]),
    "a call of nothing": Case(text=call("{}", "now"), calls=[("now", "{}")]),
    "all of it": Case(
        text=f"{THOUGHT}So.\n{CALL}\n{CALL}", reasoning="Hm.", content="So.", calls=[ULM, ULM]
    ),
    "reasoning and a call": Case(text=f"{THOUGHT}{CALL}", reasoning="Hm.", calls=[ULM]),
    "line break": Case(text=call('{"city": "a\nb"}'), calls=[("weather", '{"city": "a\\nb"}')]),
    "cut call": Case(text=CALL, cut=CALL[: CALL.index("lm")], calls=[CUT]),
    "stopped call": Case(text=CALL, stop="lm", calls=[CUT]),
    "begun call": Case(text=CALL, stop='{"city', content=CALL[: CALL.index('{"city')]),
    "cut second call": Case(text=CALL * 2, cut=CALL + CALL[: CALL.index("lm")], calls=[ULM, CUT]),
    "broken call": Case(text=call('{"city": }'), calls=[("weather", '{"city": ')]),
    "no call": Case(text=call("{}", "gone"), content=call("{}", "gone")),
    "JSON": Case(text='{"a": "b"}', content='{"a": "b"}', is_json=True),
    "prefill": Case(prefill="I lo", text="ok.", content="I look."),
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS: list[Any] = [{"name": name, "parameters": PARAMETERS} for name in ("weather", "now")]
TOOLS: list[Any] = [{"type": "function", "function": each} for each in FUNCTIONS]
HELLO: Any = {"role": "user", "content": "Hi?"}
NEXT: Any = {"role": "user", "content": "And?"}


def expected(case: Case, *, begun: dict[str, str] | None = None) -> str:
    """The prompt of the next turn. ``begun`` replaces a cut object where a client sends objects;
    otherwise the text is sent unchanged."""
    calls, results = "", ""
    for number, (name, text) in enumerate(case.calls):
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = {"arguments": text} if begun is None else begun
            text = text if begun is None else json.dumps(begun)
        pairs = "".join(f"{key}={value};" for key, value in arguments.items())
        shown = json.dumps(arguments, ensure_ascii=False)
        calls += f"<tool_call>{name} {shown} {pairs} {text}</tool_call>"
        results += f"<|tool|>{name}: result {number}<|end|>"
    thought = f"<think>{case.reasoning}</think>" if case.reasoning else ""
    return (
        f"<|user|>Hi?<|end|><|assistant|>{thought}{case.content}{calls}<|end|>"
        f"{results or '<|user|>And?<|end|>'}<|assistant|>"
    )


@dataclass
class Talk:
    """A cluster whose model answers a case's text, and the prompts that it receives."""

    cluster: Any
    anthropic: anthropic.AsyncAnthropic
    grpc: AsyncClient
    prompts: list[str]
    script: list[int]

    def say(self, case: Case) -> int:
        """Scripts the model; returns the number of tokens at which the case is cut."""
        encode = self.cluster.model.tokenizer.encode
        texts = (case.prefill, case.text)
        self.script[:] = [token for text in texts for token in encode(text)]
        return len(encode(case.cut)) if case.cut else 200

    def prompt(self) -> str:
        """The last one."""
        text = self.prompts[-1]
        self.prompts.clear()
        return text


@pytest.fixture
async def talk(
    start_cluster: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Talk]:
    monkeypatch.setattr(
        model, "tokenizer", Tokenizer(model.tokenizer._backend, chat_template=TEMPLATE)
    )
    (start,) = model.tokenizer.encode("<|assistant|>")
    script: list[int] = []
    prompts: list[str] = []

    def next_token(context: Sequence[int], *, banned: Sequence[int] = (), **_: object) -> int:
        num_said = list(reversed(context)).index(start)
        return script[num_said] if num_said < len(script) else int(model.eos)

    monkeypatch.setattr(model, "next_token", next_token)
    async with (
        start_cluster(num_groups=1, model_len=2000, num_blocks=600, config=HERMES) as cluster,
        anthropic.AsyncAnthropic(
            base_url=cluster.http_url, api_key="none", max_retries=0
        ) as messages,
        AsyncClient(cluster.grpc_address) as grpc,
    ):
        run = cluster.gateway.run

        def watched(prepared: Any, take: Any, **more: Any) -> Any:
            token_ids = prepared[0].prompt_token_ids.tolist()
            prompts.append(model.tokenizer.decode(token_ids, skip_special_tokens=False))
            return run(prepared, take, **more)

        monkeypatch.setattr(cluster.gateway, "run", watched)
        yield Talk(cluster, messages, grpc, prompts, script)


@pytest.mark.slow
async def test_at_chats(talk: Talk) -> None:
    chats = talk.cluster.openai.chat.completions
    asked: dict[str, Any] = {"model": "hash", "temperature": 0, "tools": TOOLS}
    for name, case in CASES.items():
        told = {**asked, "messages": [HELLO], "max_tokens": talk.say(case)}
        if case.stop:
            told["stop"] = [case.stop]
        if case.is_json:
            told["response_format"] = {"type": "json_object"}
        if case.prefill:
            told["messages"] = [HELLO, {"role": "assistant", "content": case.prefill}]
            told["extra_body"] = {"add_generation_prompt": False, "continue_final_message": True}
        message = (await chats.create(**told)).choices[0].message
        async with chats.stream(**told) as stream:
            chunks = [event.chunk for event in await collected(stream) if event.type == "chunk"]
            final = stream.current_completion_snapshot.choices[0].message
        ways: list[Any] = [message, message.model_dump(), final, folded_chunks(chunks)]
        for way in ways:
            if case.prefill:
                way = {"role": "assistant", "content": f"{case.prefill}{message.content}"}
            results = [
                {"role": "tool", "tool_call_id": call_id, "content": f"result {number}"}
                for number, call_id in enumerate(ids_in(plain(way).get("tool_calls"), "id"))
            ]
            messages: Any = [HELLO, way, *(results or [NEXT])]
            await chats.create(**asked, max_tokens=1, messages=messages)
            assert talk.prompt() == expected(case), (name, way)
            chat = Chat([plain(each) for each in messages], tools=TOOLS)
            await collected(talk.grpc.stream(chat, SamplingParams(max_tokens=1)))
            assert talk.prompt() == expected(case), (name, way)


@pytest.mark.slow
async def test_at_responses(talk: Talk) -> None:
    responses = talk.cluster.openai.responses
    tools: Any = [{"type": "function", **each} for each in FUNCTIONS]
    asked: dict[str, Any] = {"model": "hash", "temperature": 0, "tools": tools}
    for name, case in CASES.items():
        if case.prefill:
            continue  # This API has no prefill.
        told = {**asked, "input": "Hi?", "max_output_tokens": talk.say(case)}
        if case.stop:
            told["extra_body"] = {"stop": [case.stop]}
        if case.is_json:
            told["text"] = {"format": {"type": "json_object"}}
        response = await responses.create(**told)
        events = await collected(await responses.create(**told, stream=True))
        ways: list[list[Any]] = [
            response.output,
            [item.model_dump() for item in response.output],
            events[-1].response.output,
            [event.item for event in events if event.type == "response.output_item.done"],
        ]
        for way in ways:
            results = [
                {"type": "function_call_output", "call_id": each, "output": f"result {number}"}
                for number, each in enumerate(ids_in(way, "call_id"))
            ]
            items: Any = [HELLO, *way, *(results or [NEXT])]
            await responses.create(**asked, max_output_tokens=1, input=items)
            assert talk.prompt() == expected(case), (name, way)


@pytest.mark.slow
async def test_at_messages(talk: Talk) -> None:
    client = talk.anthropic.messages
    tools: Any = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    asked: dict[str, Any] = {"model": "hash", "tools": tools}
    for name, case in CASES.items():
        start: Any = [HELLO]
        if case.prefill:  # The answer is a further message, and joined to it.
            start = [HELLO, {"role": "assistant", "content": case.prefill}]
        told = {**asked, "max_tokens": talk.say(case), "messages": start}
        if case.stop:
            told["stop_sequences"] = [case.stop]
        answer = await client.create(**told)
        async with client.stream(**told) as stream:
            events = await collected(stream)
            final = await stream.get_final_message()
        begun = {"city": "U"} if CUT in case.calls else {}
        ways: list[tuple[list[Any], Any]] = [
            (answer.content, begun),
            ([block.model_dump() for block in answer.content], begun),
            (final.content, {}),  # Anthropic's client leaves out incomplete text.
            (folded_blocks(events), {}),
        ]
        for way, shown in ways:
            results = [
                {"type": "tool_result", "tool_use_id": each, "content": f"result {number}"}
                for number, each in enumerate(ids_in(way, "id"))
            ]
            last: Any = {"role": "user", "content": results} if results else NEXT
            said: Any = {"role": "assistant", "content": way}
            await client.create(**asked, max_tokens=1, messages=[*start, said, last])
            assert talk.prompt() == expected(case, begun=shown), (name, way)


async def test_at_grpc(talk: Talk) -> None:
    """gRPC answers are text that includes calls and reasoning."""
    for name, case in CASES.items():
        start: Any = [HELLO]
        if case.prefill:
            start = [HELLO, {"role": "assistant", "content": case.prefill}]
        chat = Chat(
            start,
            tools=TOOLS,
            add_generation_prompt=not case.prefill,
            continue_final_message=bool(case.prefill),
        )
        params = SamplingParams(temperature=0, stop=case.stop or (), max_tokens=talk.say(case))
        (completion,) = await talk.grpc.generate(chat, params)
        said = {"role": "assistant", "content": case.prefill + completion.text}
        chat = Chat([HELLO, said, NEXT], tools=TOOLS)
        await talk.grpc.generate(chat, SamplingParams(max_tokens=1))
        shown = case.prefill + (case.cut or case.text)
        shown = shown.partition(case.stop)[0] if case.stop else shown
        assert talk.prompt() == expected(Case(text="", content=shown)), name


async def test_a_prefill_ends_the_prompt_wherever_it_is_sent(talk: Talk) -> None:
    """Even a prefill that is a part of a marker is continued unchanged."""
    mark = "<|end|>"
    parts = {mark[start:end] for start in range(7) for end in range(start + 1, 8)}
    talk.say(Case(text="."))
    for part in [*sorted(parts), "<think>", "<think>\n I", "I </think", "<tool_call>"]:
        messages: Any = [HELLO, {"role": "assistant", "content": part}]
        prompt = f"<|user|>Hi?<|end|><|assistant|>{part}"
        goes_on: Any = {"add_generation_prompt": False, "continue_final_message": True}
        asked: dict[str, Any] = {"model": "hash", "messages": messages}
        chats = talk.cluster.openai.chat.completions
        await chats.create(**asked, max_tokens=1, extra_body=goes_on)
        assert talk.prompt() == prompt
        await talk.anthropic.messages.create(**asked, max_tokens=1)
        assert talk.prompt() == prompt
        token_ids = await talk.grpc.tokenize(Chat(messages, **goes_on))
        told = await talk.cluster.openai.post(
            f"{talk.cluster.http_url}/tokenize", body=asked | goes_on, cast_to=object
        )
        decode = talk.cluster.model.tokenizer.decode
        for ids in (token_ids, told["tokens"]):
            assert decode(ids, skip_special_tokens=False) == prompt


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize(
    ("begun", "thought"), [("<think>\nHm,", " so."), ("<think>\n", "so."), ("<think>", "so.")]
)
async def test_a_thought_that_was_begun_goes_on_with_its_space(
    talk: Talk, begun: str, thought: str
) -> None:
    messages: Any = [HELLO, {"role": "assistant", "content": begun}]
    asked: dict[str, Any] = {"model": "hash", "messages": messages}
    asked["max_tokens"] = talk.say(Case(prefill=begun, text=" so.\n</think>\n\nYes."))
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    answer = await talk.cluster.openai.chat.completions.create(**asked, extra_body=goes_on)
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == (thought, "Yes.")
    thinking, text = (await talk.anthropic.messages.create(**asked)).content
    assert (thinking.thinking, text.text) == (thought, "Yes.")


def plain(value: Any) -> Any:
    return value if isinstance(value, dict) else value.model_dump()


def ids_in(parts: Sequence[Any] | None, name: str) -> list[str]:
    """The ids of calls among the parts of an answer."""
    kinds = ("function", "function_call", "tool_use")
    return [each[name] for each in map(plain, parts or ()) if each["type"] in kinds]


def folded_chunks(chunks: list[Any]) -> dict[str, Any]:
    """The message that a client assembles from chunks by itself."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[Any] = []
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        message["content"] += delta.content or ""
        if thought := getattr(delta, "reasoning_content", None):
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                calls.append(call.model_dump())
            else:
                calls[call.index]["function"]["arguments"] += call.function.arguments
    return message | ({"tool_calls": calls} if calls else {})


def folded_blocks(events: list[Any]) -> list[dict[str, Any]]:
    """The content blocks that a client assembles from events by itself."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event.type == "content_block_start":
            blocks.append(event.content_block.model_dump())
            blocks[-1]["read"] = ""
        elif event.type == "content_block_delta":
            delta = event.delta.model_dump()
            (name,) = {"text", "thinking", "partial_json"} & delta.keys()
            blocks[-1]["read"] += delta[name]
    for block in blocks:
        read, kind = block.pop("read"), block["type"]
        if kind != "tool_use":
            block[kind] = read
        elif read:
            try:
                block["input"] = json.loads(read)
            except ValueError:  # It uses an empty input.
                block["input"] = {}
    return blocks
