"""Calls and reasoning of each family, read from text that is cut anywhere."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.allowed import allows
from tests.call_templates import TAKE_TEXT, TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.formats import (
    TOOL_FORMATS,
    markers_of,
)
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.parser import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from quire.cluster.dialects.tools import Tool, ToolUse, check_tool_use, check_tools
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.structured import Constraint, json_constraint
from quire.worker.text.grammar import Grammars, fill_masks
from quire.worker.text.reasoning import REASONING_FORMATS, ReasoningFormat
from quire.worker.text.tokenizer import Tokenizer

FORMATS = {each.name: each for each in TOOL_FORMATS}
THINK = next(each for each in REASONING_FORMATS if each.name == "think")

TYPES = {
    "string": st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12),
    "integer": st.integers(-(10**12), 10**12),
    "number": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "boolean": st.booleans(),
    "array": st.lists(st.integers() | st.text("ab]\"'\\,é", max_size=4), max_size=3),
    "object": st.dictionaries(st.text("ab", max_size=3), st.none() | st.booleans(), max_size=2),
    "null": st.none(),
}
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
Call = tuple[str, dict[str, Any]]


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Call]]:
    """Tools, and calls that their schemas allow."""
    tools, calls = [], []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        types = draw(st.dictionaries(names, st.sampled_from(sorted(TYPES)), max_size=4))
        tools.append(tool(name, {key: {"type": kind} for key, kind in types.items()}))
        calls.append((name, {key: draw(TYPES[kind]) for key, kind in types.items()}))
    return tools, calls


def written(form: str, calls: Sequence[Call], *, content: str = "") -> str:
    """What the family's own chat template makes of the calls."""
    if form == "pythonic":
        shown = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return f"[{', '.join(shown)}]"
    said = [
        {
            "type": "function",
            "id": f"functions.{name}:{number}" if form == "kimi_k2" else f"{number:09}",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False)
                if form in TAKE_TEXT
                else arguments,
            },
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content or None, "tool_calls": said}
    rendered: Any = render_jinja_template([[message]], chat_template=TEMPLATES[form])
    return str(rendered[0][0])


def parse(
    form: str | None,
    pieces: Sequence[str],
    tools: Sequence[Tool],
    *,
    reasoning: ReasoningFormat | None = THINK,
    is_reasoning: bool = False,
) -> list[Event]:
    """The events, where text that follows on is one event."""
    parser = OutputParser(
        calls=FORMATS[form] if form else None,
        tools=tools,
        reasoning=reasoning,
        is_reasoning=is_reasoning,
    )
    events: list[Event] = []
    told = [event for piece in pieces for event in parser.feed(piece)]
    for event in (*told, *parser.finish()):
        last = events[-1] if events else None
        if not isinstance(event, CallBegun | CallEnded) and type(last) is type(event):
            assert not isinstance(last, CallBegun | CallEnded | None)
            events[-1] = replace(last, text=last.text + event.text)
        else:
            events.append(event)
    return events


def calls_of(events: Sequence[Event]) -> list[Call]:
    """Checks also that begin and end are where they have to be."""
    calls: list[Call] = []
    inner = [event for event in events if not isinstance(event, Content | Reasoning)]
    for number in range(0, len(inner), 3):
        begun, arguments, ended = inner[number : number + 3]
        assert isinstance(begun, CallBegun)
        assert isinstance(arguments, CallArguments)
        assert begun.index == arguments.index == number // 3
        assert ended == CallEnded(begun.index)
        calls.append((begun.name, json.loads(arguments.text)))
    return calls


def cuts(text: str) -> Iterator[list[str]]:
    """Every cut in two, single characters, and a few others."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)
    chance = random.Random(text)
    for _ in range(20):
        places = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(1, 9)))
        ends = [*places, len(text)]
        yield [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=40, deadline=None)
@given(conversations())
def test_calls_are_read_as_the_chat_template_writes_them(
    form: str, conversation: tuple[list[dict[str, Any]], list[Call]]
) -> None:
    tools, calls = conversation
    events = parse(form, [written(form, calls)], check_tools(tools))
    assert calls_of(events) == calls
    assert not [event for event in events if isinstance(event, Content)]


TOOLS = check_tools(
    [
        tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        tool("now", {}),
        tool("any", {"x": {}, "y": {"anyOf": [{"type": "string"}, {"type": "null"}]}}),
    ]
)
CALLS: list[Call] = [
    ("weather", {"city": 'Zürich, "old" {town}]\\\n', "days": 3}),
    ("now", {}),
    ("any", {"x": [1, {"a": "b"}], "y": "no\nyes "}),
]
ODD = {
    "hermes": [
        "a <tool_call> is <tool_call>\n{}</tool_call> <tool",
        '<tool_call>{"name": "now"}</tool_call> and then',
        '<tool_call>{"arguments": {"a": 1}, "name": "now"}}\n</tool_call>x',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        '<tool_call>{"name": "weather", "argum',
    ],
    "qwen3_coder": [
        "<function=now>\n</function>",
        "see <function=now",
        "<tool_call>\n<function=any>\n<parameter=y>\nnull\n</parameter>\n<parameter=x>\nTrue",
        "<tool_call>\n<function=weather>\n<parameter=city>\nPa\n</para",
    ],
    "glm45": ["<tool_call>Hello world</tool_call>", "<tool_call>weather<arg_key>city</arg_key>"],
    "llama3_json": [
        '<|python_tag|>{"name": "now", "parameters": {}}<|python_end|>',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "Bob", "age": 3}',
        ' {"city": "Rome"}',
    ],
    "pythonic": [
        "[1] says",
        "[now(), gone()]",
        "<|python_start|>[now()]<|python_end|>",
        "[now(a=1",
    ],
    "mistral": ["[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS] none", '[TOOL_CALLS][{"name": "now"}, 1]'],
    "mistral_v11": ['[TOOL_CALLS][{"name": "now", "arguments": {}}]', "[TOOL_CALLS]now[ARGS] 5"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>no",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>no",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:x",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{",
    ],
    "granite": [
        "<|tool_call|>[]",
        "<|tool_call|>",
        '<|tool_call|>[{"name": "now"}]<|/tool_call|>.',
    ],
    "harmony": [
        "<|channel|>analysis<|message|>H\n<|end|><|start|>assistant<|channel|>final<|message|>So <",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
        " to=functions.now<|channel|>commentary<|message|><|call|>",
        " to=us <|start|>assistant<|channel|>commentary<|message|>I <|look|>.<|end|><|start|>ass",
        "<|channel|>analysis to=functions.now<|channel|><|message|> {<|start|>assistant<|message|>",
        "<|channel|>final<|end|>y",
        f"<|start|>{'a' * 300}<|message|>x",
    ],
    "functiongemma": [
        "<start_function_call>call:now{}<end_function_call><start_function_response>",
        "a <start_function_call> b",
        "<start_function_call>call:any{x:[1,{a:<escape>b<escape>},],y:None}<end_function_call>",
        '<start_function_call>call:any{<escape>x<escape>:"q\\"",y:tr}<end_function_call>.',
        "<start_function_call>call:weather{city:<escape>Par",
        "<start_function_call>call:weather{city}<end_function_call>",
        f"<start_function_call>call:any{{x:{'[' * 50}",
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"],
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_is_read_wherever_the_text_is_cut(form: str) -> None:
    bare = FORMATS[form].is_bare
    texts = [written(form, CALLS, content="" if bare else "I look.\n\n"), *ODD[form]]
    texts.append(f"<think>\n Well \n</think>\n\n{written(form, CALLS[:1])}\n")
    texts.append(f"<think> <tool_call> {written(form, CALLS[:1])}")
    for text in texts:
        whole = parse(form, [text], TOOLS)
        for pieces in cuts(text):
            assert parse(form, pieces, TOOLS) == whole, pieces
    assert calls_of(parse(form, texts[:1], TOOLS)) == CALLS


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_is_lost_that_only_looks_like_a_call(form: str, data: st.DataObject) -> None:
    markers = [
        *FORMATS[form].opens,
        *FORMATS[form].shapes[0].end,
        '{"name": "x"',
        "<think>",
        "a",
        "\n",
    ]
    pieces = [
        marker[: data.draw(st.integers(0, len(marker)))] if cut else marker
        for marker, cut in data.draw(
            st.lists(st.tuples(st.sampled_from(markers), st.booleans()), max_size=8)
        )
    ]
    text = "".join(pieces)
    events = parse(form, [text], TOOLS, reasoning=None)
    assert parse(form, pieces, TOOLS, reasoning=None) == events
    if not any(isinstance(event, CallBegun) for event in events):
        assert events == ([Content(text)] if text else [])


def test_raw_arguments_are_the_models_own_text() -> None:
    arguments = '{"days" :3,  "city":"Z\\u00fcrich", "days": 1e0}'
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert parse("hermes", [text], TOOLS) == [
        CallBegun(0, "weather"),
        CallArguments(0, arguments),
        CallEnded(0),
    ]


def test_half_a_character_is_no_name_and_no_argument() -> None:
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert parse("hermes", [text], TOOLS) == [Content(text)]
    events = parse("pythonic", ["[any(x=['\\ud800'])]"], TOOLS)
    assert events[1] == CallArguments(0, '{"x": ["\\ud800"]}')


def test_arguments_stream_as_they_come() -> None:
    parser = OutputParser(calls=FORMATS["hermes"], tools=TOOLS)
    assert parser.feed('<tool_call>{"name": "weather", ') == []
    begun = parser.feed('"arguments": {"ci')
    assert begun == [CallBegun(0, "weather"), CallArguments(0, '{"ci')]
    assert parser.feed('ty": "Ro') == [CallArguments(0, 'ty": "Ro')]
    parser = OutputParser(calls=FORMATS["qwen3_coder"], tools=TOOLS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\nRo")
    assert parser.feed("me") == [CallArguments(0, "me")]


def test_a_cut_off_answer_ends_where_it_was_cut() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert parse("hermes", [text], TOOLS) == [
        CallBegun(0, "weather"),
        CallArguments(0, '{"city": "Par'),
        CallEnded(0),
    ]
    text = "<tool_call><function=weather><parameter=days>12"
    assert parse("qwen3_coder", [text], TOOLS)[1] == CallArguments(0, '{"days": 12')


def test_bare_calls_are_of_tools_that_the_request_has() -> None:
    for form, text in (
        ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}'),
        ("pythonic", "[Bob(age=3)]"),
    ):
        assert parse(form, [text], TOOLS) == [Content(text)]


def test_without_tools_markers_are_text() -> None:
    text = written("hermes", CALLS)
    assert parse("hermes", [text], ()) == [Content(text)]


def test_reasoning_is_at_the_beginning_or_was_begun_by_the_prompt() -> None:
    assert parse(None, ["<think>\na \n b</think>\n\nc <think>"], ()) == [
        Reasoning("a \n b"),
        Content("c <think>"),
    ]
    assert parse(None, ["a</think>b"], (), is_reasoning=True) == [Reasoning("a"), Content("b")]
    assert parse(None, ["a</thin"], (), is_reasoning=True) == [Reasoning("a</thin")]
    assert parse(None, ["so <think>a</think>"], ()) == [Content("so <think>a</think>")]
    assert parse(None, ["<think>\n\n</think>\n\nx"], ()) == [Content("x")]


def test_a_tagged_argument_is_what_its_schema_says() -> None:
    def read(value: str, schema: dict[str, Any]) -> object:
        tools = check_tools([tool("f", {"a": schema})])
        text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        ((_, arguments),) = calls_of(parse("glm45", [text], tools))
        return arguments["a"]

    assert read("5", {"type": "string"}) == "5"
    assert read("5", {"type": "integer"}) == 5
    assert read("5", {"enum": ["5", "6"]}) == "5"
    assert read("5", {}) == 5
    assert read("five", {"type": "integer"}) == "five"
    assert read("5", {"type": ["string", "null"]}) == "5"
    assert read("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}) is None
    assert read("True", {"type": "boolean"}) is True
    assert read("NaN", {"type": "number"}) == "NaN"


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """Its special tokens are the markers that are such in known models."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"}
    special |= {"<escape>", "<start_function_call>"}
    special |= {"[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>"}
    for form in FORMATS.values():
        special |= {
            token for text in markers_of(form) for token in re.findall("<｜[^｜]*｜>", text)
        }
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|end|>", *sorted(special - {"<|end|>"})],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the weather"], trainer)
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def grammars(marked: Tokenizer) -> Grammars:
    return Grammars(lambda: marked, vocab_size=marked.vocab_size, eos_token_ids=[0])


def required(tools: list[dict[str, Any]], choice: object = "required") -> ToolUse:
    return check_tool_use(tools, choice, is_parallel=True)


def walk(
    grammars: Grammars, marked: Tokenizer, constraint: Constraint | None, chance: random.Random
) -> str:
    """A text that the grammar allows, drawn token by token."""
    assert constraint is not None
    matcher = grammars.compile(constraint).matcher()
    token_ids: list[int] = []
    ahead: list[int] = []  # What ends texts that have any characters, and would not come by chance.
    ends_of_texts = [
        marked.encode(text) for text in ("</arg_value>", "\n</parameter>", "<escape>", '<|"|>')
    ]
    while True:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask_W.view(np.uint8), bitorder="little"))
        # Texts of some length, not of any.
        ends = [each for each in allowed if each == 0 or chr(34) in marked.token_text(int(each))]
        if not ahead or ahead[0] not in allowed:
            ahead = list(chance.choice(ends_of_texts)) if chance.random() < 0.2 else []
        if ahead and ahead[0] in allowed:
            token_id = ahead.pop(0)
        else:
            token_id = int(chance.choice(ends if ends and len(token_ids) > 60 else list(allowed)))
        if token_id == 0:
            return marked.decode(token_ids, skip_special_tokens=False)
        token_ids.append(token_id)
        assert len(token_ids) < 3000
        matcher.consume([token_id])
        fill_masks([matcher])
        assert matcher.error is None


NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "weather"}}


def in_json(text: str, form: str) -> str:
    """Calls as the grammar has them: without ids, and with Python's values as JSON."""
    text = re.sub(r', "id": "\d{9}"', "", text)
    if form == "harmony":  # The templates have the function before the channel, models behind it.
        text = re.sub(
            r"assistant( to=\S+)<\|channel\|>commentary json",
            r"assistant<|channel|>commentary\1 <|constrain|>json",
            text,
        )
        return text.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    if form != "pythonic":
        return text
    calls = calls_of(parse(form, [text], TOOLS))
    shown = []
    for name, arguments in calls:
        pairs = [f"{key}={json.dumps(arguments[key], ensure_ascii=False)}" for key in arguments]
        shown.append(f"{name}({', '.join(pairs)})")
    return f"[{', '.join(shown)}]"


STRICT: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer"},
                    "more": {"type": "array", "items": {"type": "boolean"}},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "strict": True, "parameters": NOTHING}},
]
GOOD: list[Call] = [
    ("weather", {"city": 'Zürich, "old" {town}]\\\n', "unit": "C", "days": 3}),
    ("now", {}),
    ("weather", {"city": "", "days": -1, "more": [True, False]}),
]


@pytest.mark.parametrize("form", FORMATS)
def test_as_many_tools_as_openai_takes_are_no_hostile_grammar(
    form: str, marked: Tokenizer, grammars: Grammars
) -> None:
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}]
    properties = {f"argument_{n}": kinds[n % 3] for n in range(6)}
    schema = {"type": "object", "properties": properties, "required": ["argument_0"]}
    tools = tuple(
        Tool(name=f"do_{n}", parameters=schema, is_strict=True, spec={}) for n in range(128)
    )
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, ToolUse(tools=tools), None, reasons=False)
    assert constraint is not None
    grammars.compile(constraint)


@pytest.mark.parametrize("form", FORMATS)
def test_the_grammar_allows_what_the_chat_template_writes(
    form: str, marked: Tokenizer, grammars: Grammars
) -> None:
    dialect = choose_dialect(marked, tool_call_parser=form)
    must = constrain(dialect, required(STRICT), None, reasons=False)
    may = constrain(dialect, required(STRICT, "auto"), None, reasons=False)
    one = constrain(dialect, required(STRICT, NAMED), None, reasons=False)
    text = in_json(written(form, GOOD), form)
    bare = FORMATS[form].is_bare
    for wrong in (
        written(form, [("weather", {"city": "x"})]),
        written(form, [("weather", {"city": "x", "unit": "K", "days": 1})]),
        written(form, [("weather", {"city": "x", "days": "soon"})]),
        written(form, [("gone", {})]),
    ):
        for constraint in (must, may, one):
            assert not allows(grammars, marked, constraint, in_json(wrong, form).lstrip())
    assert allows(grammars, marked, must, text.lstrip())
    assert not allows(grammars, marked, must, f"So: {text.lstrip()}")
    framed = FORMATS[form].frame
    said = f"{framed.answer}I know." if framed else "I know." if bare else f"So: {text}"
    assert allows(grammars, marked, may, said)
    assert allows(grammars, marked, may, text.lstrip())
    assert allows(grammars, marked, may, "") != bool(framed)
    assert not allows(grammars, marked, one, text.lstrip())
    assert allows(grammars, marked, one, in_json(written(form, GOOD[:1]), form).lstrip())


@pytest.mark.parametrize("form", FORMATS)
def test_the_parser_reads_what_the_grammar_allows(
    form: str, marked: Tokenizer, grammars: Grammars
) -> None:
    use = required(STRICT)
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    for seed in range(6):
        text = walk(grammars, marked, constraint, random.Random(seed))
        events = parse(form, [text], use.tools)
        assert not [event for event in events if isinstance(event, Content)], text
        for name, arguments in calls_of(events):
            schema = next(tool.parameters for tool in use.tools if tool.name == name)
            jsonschema.validate(arguments, schema)


def test_reasoning_comes_before_the_form(marked: Tokenizer, grammars: Grammars) -> None:
    dialect = choose_dialect(marked, tool_call_parser="hermes", reasoning_parser="think")
    call = written("hermes", [("now", {})]).lstrip()
    form = json_constraint({"type": "object", "properties": {"a": {"type": "integer"}}})
    for use, asked, answer in ((required(STRICT), None, call), (ToolUse(), form, '{"a": 1}')):
        begun = constrain(dialect, use, asked, reasons=True)
        ended = constrain(dialect, use, asked, reasons=False)
        free = constrain(dialect, use, asked, reasons=None)
        assert allows(grammars, marked, begun, f"Hm.\n</think>\n\n{answer}")
        assert not allows(grammars, marked, begun, answer)
        assert allows(grammars, marked, ended, answer)
        assert not allows(grammars, marked, ended, f"<think>Hm.</think>{answer}")
        assert allows(grammars, marked, free, f"<think>Hm.</think>{answer}")
        assert allows(grammars, marked, free, answer)
    assert constrain(dialect, ToolUse(), None, reasons=None) is None
    regex = Constraint("regex", "a+")
    with pytest.raises(InvalidRequest, match=r"a regex as .* cannot be had with tool_choice"):
        constrain(dialect, required(STRICT), regex, reasons=None)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_answer_is_a_call_or_of_the_form(
    form: str, is_strict: bool, marked: Tokenizer, grammars: Grammars
) -> None:
    dialect = choose_dialect(marked, tool_call_parser=form)
    tools = deepcopy(STRICT)
    for each in tools:
        each["function"]["strict"] = is_strict
    json_form = json_constraint(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    if form == "llama3_json" and is_strict:
        with pytest.raises(InvalidRequest, match="response_format cannot be had with strict tools"):
            constrain(dialect, required(tools, "auto"), json_form, reasons=False)
        return
    may = constrain(dialect, required(tools, "auto"), json_form, reasons=False)
    must = constrain(dialect, required(tools), json_form, reasons=False)
    none = constrain(dialect, ToolUse(), json_form, reasons=False)
    call = in_json(written(form, GOOD), form).lstrip()
    assert allows(grammars, marked, may, call) == (form != "llama3_json")
    assert allows(grammars, marked, must, call)
    assert not allows(grammars, marked, none, call)
    assert allows(grammars, marked, may, '{"a": 1}')
    assert allows(grammars, marked, none, '{"a": 1}')
    assert not allows(grammars, marked, must, '{"a": 1}')
    for text in ('{"a": "b"}', "So be it."):
        for constraint in (may, must, none):
            assert not allows(grammars, marked, constraint, text)


def test_messages_have_a_channel_each(marked: Tokenizer, grammars: Grammars) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    called = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    answered = '<|channel|>final<|message|>{"a": 1}'
    preamble = "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant"
    harmony = next(each for each in REASONING_FORMATS if each.name == "harmony")
    now = [CallBegun(0, "now"), CallArguments(0, "{}"), CallEnded(0)]
    for text, events in (
        (thought + answered, [Reasoning("Hm."), Content('{"a": 1}')]),
        (thought + preamble + called, [Reasoning("Hm."), Content("I look. "), *now]),
        (preamble + thought + called, [Content("I look. "), Reasoning("Hm."), *now]),
    ):
        assert parse("harmony", [text], TOOLS, reasoning=harmony) == events
    assert parse(None, [thought + answered], (), reasoning=harmony)[1] == Content('{"a": 1}')
    dialect = choose_dialect(marked, tool_call_parser="harmony", reasoning_parser="harmony")
    form = json_constraint({"type": "object", "properties": {"a": {"type": "integer"}}})
    for use, asked, answer in ((required(STRICT), None, called), (ToolUse(), form, answered)):
        constraint = constrain(dialect, use, asked, reasons=None)
        assert allows(grammars, marked, constraint, thought + answer)
        assert allows(grammars, marked, constraint, answer)
        assert not allows(grammars, marked, constraint, f"{thought}So")


def test_a_model_that_gives_ids_to_its_calls_is_told_them_again() -> None:
    events = parse("kimi_k2", [written("kimi_k2", CALLS)], TOOLS)
    ids = [event.given_id for event in events if isinstance(event, CallBegun)]
    assert ids == ["functions.weather:0", "functions.now:1", "functions.any:2"]


def test_a_schema_that_a_format_cannot_keep_is_refused_by_name(marked: Tokenizer) -> None:
    dialect = choose_dialect(marked, tool_call_parser="glm45")
    use = required([tool("f", {"a": {"type": "string", "pattern": "x+"}})])
    with pytest.raises(InvalidRequest, match="tools: pattern, of the argument 'a' of 'f', is not"):
        constrain(dialect, use, None, reasons=False)


def test_braces_hold_values_of_any_depth(marked: Tokenizer, grammars: Grammars) -> None:
    properties = {
        "at": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "zip": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
        "days": {"type": "array", "items": {"enum": ["Mo", "Tu"]}},
        "more": {},
    }
    told = tool("f", properties)
    told["function"]["parameters"] |= {"$defs": {"city": {"type": "string"}}, "required": ["at"]}
    use = required([told])
    dialect = choose_dialect(marked, tool_call_parser="functiongemma")
    constraint = constrain(dialect, use, None, reasons=False)
    for arguments, is_good in (
        (
            {"at": {"city": "a,}b", "zip": None}, "days": ["Mo", "Tu"], "more": {"a": [1, ["x"]]}},
            True,
        ),
        ({"at": {"city": ""}, "days": [], "more": "<"}, True),
        ({"at": {"zip": 1}}, False),
        ({"at": {"city": "a", "zip": "b"}}, False),
        ({"at": {"city": "a"}, "days": ["We"]}, False),
        ({"days": ["Mo"]}, False),
    ):
        text = written("functiongemma", [("f", arguments)])
        assert allows(grammars, marked, constraint, text) == is_good
        assert calls_of(parse("functiongemma", [text], use.tools)) == [("f", arguments)]
    free = tool("f", {"a": {"type": "array", "items": {"type": "string", "pattern": "x+"}}})
    with pytest.raises(InvalidRequest, match=r"tools: pattern, of the argument 'a\[\]' of 'f'"):
        constrain(dialect, required([free]), None, reasons=False)
