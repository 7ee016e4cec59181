"""Formats of tool calls that no table has are derived from the chat template's output."""

import json
import re
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire import demo_model
from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)
from quire.cluster.dialects.parser import OutputParser
from quire.cluster.dialects.tools import Tool, ToolUse
from quire.worker.request.errors import InvalidRequest
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.tokenizer import Tokenizer

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}CALLS"
    "{% endif %}<|end|>{% endfor %}{# tools #}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}ONE{% endfor %}"
ITEMS = "{% for k, v in f.arguments | items %}ITEM{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"


def each(one: str, *, begin: str = "", between: str = "", end: str = "") -> str:
    joined = "{% if not loop.last %}" + between + "{% endif %}"
    return TURNS.replace("CALLS", begin + EACH.replace("ONE", one + joined) + end)


OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
FORMATS = {
    "a list in tags": each(OBJECT, begin="\n<calls>[", between=", ", end="]</calls>"),
    "a list": each(OBJECT, begin="[", between=", ", end="]"),
    "lines": each(OBJECT, begin="<calls>\n", between="\n", end="\n</calls>"),
    "other keys": each(
        '{"call_id": "{{ loop.index }}", "tool": "{{ f.name }}", '
        '"input": {{ f.arguments | tojson }}}',
        begin="<act>[\n  ",
        between=",\n  ",
        end="\n]</act>",
    ),
    "the name as key": each(
        '{"{{ f.name }}": {{ f.arguments | tojson }}}', begin="<do>[", between=", ", end="]</do>"
    ),
    "a tag with the name": each("<fn={{ f.name }}>{{ f.arguments | tojson }}</fn>"),
    "an id before the name": each(
        "<|id|>{{ c.id }}<|name|>{{ f.name }}<|args|>{{ f.arguments | tojson }}<|done|>",
        begin="<|calls|>",
        end="<|called|>",
    ),
    "an id behind the name": each(
        "<|call|>{{ f.name }}<|id|>{{ c.id }}<|args|>{{ f.arguments | tojson }}"
    ),
    "parameters in tags": each(
        '<invoke name="{{ f.name }}">\n'
        + ITEMS.replace("ITEM", f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n')
        + "</invoke>\n",
        begin="\n<tool:call>\n",
        end="</tool:call>",
    ),
    "parameters with types": each(
        '<invoke name="{{ f.name }}">\n'
        + ITEMS.replace(
            "ITEM",
            "<p name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
            f"{VALUE}</p>\n",
        )
        + "</invoke>\n",
        begin="<calls>\n",
        end="</calls>",
    ),
    "keys and values": each(
        "<tool_call>{{ f.name }}\n"
        + ITEMS.replace("ITEM", f"<key>{{{{ k }}}}</key>\n<value>{VALUE}</value>\n")
        + "</tool_call>"
    ),
    "Python": each(
        "{{ f.name }}("
        + "{% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
        + "{% if not loop.last %}, {% endif %}{% endfor %})",
        begin="<|start|>[",
        between=", ",
        end="]<|stop|>",
    ),
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array"},
        "sure": {"type": "boolean"},
    },
}
TOOLS = [Tool(name=name, parameters=WEATHER, spec={}) for name in ("weather", "map")]
CITIES = st.text(st.characters(exclude_characters="<\\", exclude_categories=["C", "Z"]), min_size=1)


chosen = cache(choose_dialect)


def parse(tokenizer: Tokenizer, text: str, cuts: list[int], **options: Any) -> list[Event]:
    dialect = chosen(tokenizer)
    assert dialect.calls is not None
    parser = OutputParser(calls=dialect.calls, tools=TOOLS, **options)
    events: list[Event] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += parser.feed(text[start:end])
    return events + parser.finish()


def calls_in(events: list[Event]) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallBegun(_, name):
                calls.append([name, ""])
            case CallArguments(_, text):
                calls[-1][1] += text
    return content, [(name, json.loads(text)) for name, text in calls]


@cache
def with_template(source: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=source)


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), city=CITIES)
def test_what_a_template_writes_is_read_in_every_cut(
    name: str, data: st.DataObject, city: str
) -> None:
    source = FORMATS[name]
    wanted = [
        ("weather", {"city": city, "days": [1, 2], "sure": True}),
        ("map", {"city": city, "days": [], "sure": False}),
    ]
    calls = [
        {"id": f"callAB00{n}", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        for n, (tool, arguments) in enumerate(wanted)
    ]
    chat: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    text = ChatTemplate(source, special_tokens={}).render(chat, add_generation_prompt=False)
    answer = text.partition("<|assistant|>")[2].removesuffix("<|end|>")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=4)))
    said, read = calls_in(parse(with_template(source), answer, cuts))
    assert (said.strip(), read) == ("", wanted)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("Python", "<|start|> [weather(sure=True)]<|stop|>"),
        (
            "parameters with types",
            '<calls>\n<invoke name="weather">\n<p name="sure" string="true">true</p>\n</invoke>\n'
            "</calls>",
        ),
    ],
)
def test_slips_of_models_are_read_in_such_formats_too(form: str, text: str) -> None:
    tokenizer = with_template(FORMATS[form])
    assert calls_in(parse(tokenizer, text, [])) == ("", [("weather", {"sure": True})])


@pytest.mark.parametrize(("begin", "between", "end"), [("[", ", ", "]"), ("\n", "\n", "\n")])
def test_a_template_decides_against_a_table_that_writes_its_marks_otherwise(
    begin: str, between: str, end: str
) -> None:
    around = {"begin": f"<tool_call>{begin}", "end": f"{end}</tool_call>"}
    tokenizer = with_template(each(OBJECT, between=between, **around))
    calls = ('{"name": "weather", "arguments": {}}', '{"name": "map", "arguments": {}}')
    text = f"<tool_call>{begin}{between.join(calls)}{end}</tool_call>"
    said, read = calls_in(parse(tokenizer, text, []))
    assert (said, read) == ("", [("weather", {}), ("map", {})])
    calls_read = chosen(tokenizer).calls
    assert calls_read is not None
    assert calls_read.shapes[0].between is not None


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (TURNS.replace("CALLS", "{{ m.tool_calls[0].id }}"), "does not show the calls"),
        (
            TURNS.replace("CALLS", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"),
            "cannot be told from text",
        ),
        (TURNS.replace("CALLS", "{{ raise_exception('no') }}"), "refuses these messages: no"),
        (
            "{% for m in messages %}{% if m.tool_calls %}{{ 1 / 0 }}{% endif %}{% endfor %}"
            "{# tool #}",
            "division by zero",
        ),
        # It renders tools and marked text, but no calls.
        (
            "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|><say>{{ m.content or '' }}"
            "</say>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "does not show the calls",
        ),
        # It has the markers of a known format, but writes arguments as nested tags.
        (
            each("<tool_call><{{ f.name }}><city>{{ f.arguments }}</city></{{ f.name }}>"),
            "in no form that can be read",
        ),
    ],
)
def test_a_template_whose_calls_cannot_be_read_shows_no_format(source: str, why: str) -> None:
    dialect = choose_dialect(with_template(source))
    assert dialect.calls is None
    assert why in dialect.why_no_calls
    with pytest.raises(InvalidRequest, match=re.escape(f"({dialect.why_no_calls})")):
        dialect.check(ToolUse(tools=tuple(TOOLS)))


def test_tools_are_refused_where_no_format_is_shown() -> None:
    nameless = choose_dialect(with_template("{{ messages[0].content }}"))
    with pytest.raises(InvalidRequest, match=r"does not name .*serve it with a --chat-template"):
        nameless.check(ToolUse(tools=tuple(TOOLS)))
    unread = choose_dialect(with_template(TURNS))
    with pytest.raises(InvalidRequest, match="serve it with --tool-call-parser"):
        unread.check(ToolUse(tools=tuple(TOOLS)))
    dialect = choose_dialect(Tokenizer.load(demo_model.PATH))
    with pytest.raises(InvalidRequest, match="chat template shows none of the known formats of"):
        dialect.check(ToolUse(tools=tuple(TOOLS)))


HERMES = with_template(each("\n<tool_call>\n" + OBJECT + "\n</tool_call>"))


def test_a_name_of_no_tool_is_no_call() -> None:
    text = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'
    assert calls_in(parse(HERMES, text, [])) == (text, [])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
        (r'{"city": "it\'s \d"}', {"city": "it's \\d"}),
        (r'{"city": "\\"}', {"city": "\\"}),
        ('""', {}),
        ('" "', {}),
        (r'"{\"city\": \"a\"}"', {"city": "a"}),
    ],
)
@given(data=st.data())
def test_arguments_are_json_whatever_the_model_writes_in_its_strings(
    written: str, meant: object, data: st.DataObject
) -> None:
    text = f'<tool_call>\n{{"name": "map", "arguments": {written}}}\n</tool_call>'
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    events = parse(HERMES, text, cuts)
    assert calls_in(events) == ("", [("map", meant)])
    assert events[-1] == CallEnded(0)


@pytest.mark.parametrize("arguments", ['{"city": "Be', "[1]", "{'city': 1}", '{"a": 1,}'])
def test_a_call_whose_arguments_are_no_object_is_not_whole(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "map", "arguments": {arguments}'
    assert parse(HERMES, text, [])[-1] == CallEnded(0, is_whole=False)


@pytest.mark.parametrize("last", ["", " </think> Done."])
def test_a_call_within_reasoning_that_does_not_end_is_a_call(last: str) -> None:
    call = '<tool_call>\n{"name": "map", "arguments": {}}\n</tool_call>'
    tokenizer = with_template("</think>" + each("\n" + call))
    reasoning = choose_dialect(tokenizer).reasoning
    text = f"It <tool_call> says {call}{last}"
    events = parse(HERMES, text, [], reasoning=reasoning, is_reasoning=True)
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    said, calls = calls_in(events)
    assert (thought, said.strip(), calls) == (
        "It <tool_call> says",
        last.removeprefix(" </think> "),
        [("map", {})],
    )


def test_the_id_that_mistral_writes_is_not_part_of_the_name() -> None:
    text = '[TOOL_CALLS]map[CALL_ID]abcdef123[ARGS]{"city": "Bern"}'
    dialect = choose_dialect(HERMES, tool_call_parser="mistral_v11")
    parser = OutputParser(calls=dialect.calls, tools=TOOLS)
    events = parser.feed(text) + parser.finish()
    assert events[0] == CallBegun(0, "map", "abcdef123")
    assert calls_in(events) == ("", [("map", {"city": "Bern"})])
