"""Parsing of tool calls and reasoning of each model family, from text cut anywhere."""

import json
import random
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.allowed import allows
from tests.dialects import (
    FORMATS,
    Call,
    calls_of,
    conversations,
    cuts,
    in_json,
    parse,
    required,
    tool,
    written,
)
from tests.examples import examples
from tests.marked import walk

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.events import CallArguments, CallBegun, CallEnded, Content, Reasoning
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.parser import OutputParser
from quire.cluster.dialects.tools import Tool, ToolUse, check_tools
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.structured import Constraint, json_constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.reasoning import REASONING_FORMATS
from quire.worker.text.tokenizer import Tokenizer


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=examples(40), deadline=None)
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
    "gemma4": [
        "<|tool_call>call:now{}<tool_call|><|tool_response>",
        'a <|tool_call>call:any{x:[{a:<|"|>{b}<|"|>}],y:null}<tool_call|><|tool_call> b',
        '<|tool_call>call:any{<|"|>x<|"|>:{<|"|>y<|"|>:-1.5e3}}<tool_call|>.',
        '<|tool_call>call:weather{city:<|"|>Par<|"',
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"],
}


@pytest.mark.quick_cells(3)
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


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_text_is_lost_that_only_looks_like_a_call(form: str, data: st.DataObject) -> None:
    markers = [
        *FORMATS[form].opens,
        *FORMATS[form].shapes[0].end,
        FORMATS[form].implied,
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
        CallEnded(0, is_whole=False),
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
    for pieces in (["\n a</think>b"], list("\n a</think>b")):
        assert parse(None, pieces, (), is_reasoning=True) == [Reasoning("a"), Content("b")]
        events = parse(None, pieces, (), is_reasoning=True, goes_on=True)
        assert events == [Reasoning("\n a"), Content("b")]
    assert parse(None, ["so <think>a</think>"], ()) == [Content("so <think>a</think>")]
    assert parse(None, ["<think>\n\n</think>\n\nx"], ()) == [Content("x")]


def test_a_tagged_argument_is_what_its_schema_says() -> None:
    def read(value: str, schema: dict[str, Any], *, fits: bool = True) -> object:
        tools = check_tools([tool("f", {"a": schema})])
        text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        _, arguments, ended = parse("glm45", [text], tools)
        assert isinstance(arguments, CallArguments)
        assert ended == CallEnded(0, is_whole=fits)
        return json.loads(arguments.text)["a"]

    assert read("5", {"type": "string"}) == "5"
    assert read("5", {"type": "integer"}) == 5
    assert read("5", {"enum": ["5", "6"]}) == "5"
    assert read("5", {}) == 5
    assert read("five", {"type": "integer"}, fits=False) == "five"
    assert read("5", {"type": ["string", "null"]}) == "5"
    assert read("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}) is None
    assert read("True", {"type": "boolean"}) is True
    assert read("NaN", {"type": "number"}, fits=False) == "NaN"


NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "weather"}}


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
    text = in_json(written(form, GOOD), form, TOOLS)
    bare = FORMATS[form].is_bare
    for wrong in (
        written(form, [("weather", {"city": "x"})]),
        written(form, [("weather", {"city": "x", "unit": "K", "days": 1})]),
        written(form, [("weather", {"city": "x", "days": "soon"})]),
        written(form, [("gone", {})]),
    ):
        for constraint in (must, may, one):
            assert not allows(grammars, marked, constraint, in_json(wrong, form, TOOLS).lstrip())
    assert allows(grammars, marked, must, text.lstrip())
    assert not allows(grammars, marked, must, f"So: {text.lstrip()}")
    framed = FORMATS[form].frame
    said = f"{framed.answer}I know." if framed else "I know." if bare else f"So: {text}"
    assert allows(grammars, marked, may, said)
    assert allows(grammars, marked, may, text.lstrip())
    assert allows(grammars, marked, may, "") != bool(framed)
    assert not allows(grammars, marked, one, text.lstrip())
    assert allows(grammars, marked, one, in_json(written(form, GOOD[:1]), form, TOOLS).lstrip())


@pytest.mark.quick_cells(5)
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
    call = in_json(written(form, GOOD), form, TOOLS).lstrip()
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


@pytest.mark.parametrize("form", ["functiongemma", "gemma4"])
def test_braces_hold_values_of_any_depth(form: str, marked: Tokenizer, grammars: Grammars) -> None:
    properties = {
        "at": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "zip": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
        "Days": {"type": "array", "items": {"enum": ["Mo", "Tu"]}},
        "more": {},
    }
    told = tool("f", properties)
    told["function"]["parameters"] |= {"$defs": {"city": {"type": "string"}}, "required": ["at"]}
    use = required([told])
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    for arguments, is_good in (
        (
            {"at": {"city": "a,}b", "zip": None}, "Days": ["Mo", "Tu"], "more": {"a": [1, ["x"]]}},
            True,
        ),
        ({"at": {"city": ""}, "Days": [], "more": "<"}, True),
        ({"at": {"zip": 1}}, False),
        ({"at": {"city": "a", "zip": "b"}}, False),
        ({"at": {"city": "a"}, "Days": ["We"]}, False),
        ({"Days": ["Mo"]}, False),
    ):
        text = written(form, [("f", arguments)])
        assert allows(grammars, marked, constraint, text) == is_good
        assert calls_of(parse(form, [text], use.tools)) == [("f", arguments)]
    free = tool("f", {"a": {"type": "array", "items": {"type": "string", "pattern": "x+"}}})
    with pytest.raises(InvalidRequest, match=r"tools: pattern, of the argument 'a\[\]' of 'f'"):
        constrain(dialect, required([free]), None, reasons=False)


def test_gemma_thinks_in_a_channel_and_then_calls() -> None:
    gemma4 = next(each for each in REASONING_FORMATS if each.name == "gemma4")
    called = '<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>'
    events = [CallBegun(0, "weather"), CallArguments(0, '{"city": "Ulm"}'), CallEnded(0)]
    for text, is_reasoning in (
        (f"<|channel>thought\nHm.\n<channel|>{called}", False),
        (f"Hm.\n<channel|>{called}", True),
    ):
        for pieces in cuts(text):
            told = parse("gemma4", pieces, TOOLS, reasoning=gemma4, is_reasoning=is_reasoning)
            assert told == [Reasoning("Hm."), *events]


@pytest.mark.parametrize(
    ("form", "mark"), [("glm45", "</arg_value>"), ("qwen3_coder", "</parameter>")]
)
def test_where_calls_have_a_form_a_mark_within_json_ends_nothing(
    form: str, mark: str, marked: Tokenizer, grammars: Grammars
) -> None:
    told = tool("f", {"a": {"type": "array"}, "b": {"type": "string"}, "c": {}})
    told["function"]["parameters"]["required"] = ["a", "b", "c"]
    use = required([told])
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    for arguments, is_good in (
        ({"a": [f'"{mark}\\', {"x": mark}], "b": "", "c": "{ ["}, True),
        ({"a": [], "b": mark, "c": 1}, False),
        ({"a": [], "b": f"x{mark}\n", "c": 1}, False),
    ):
        text = written(form, [("f", arguments)]).lstrip()
        assert allows(grammars, marked, constraint, text) == is_good
        if is_good:
            for pieces in cuts(text):
                events = parse(form, pieces, use.tools, has_form=True)
                assert calls_of(events) == [("f", arguments)]


@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
def test_the_grammar_allows_constants_as_python_writes_them(
    form: str, marked: Tokenizer, grammars: Grammars
) -> None:
    told = tool("f", {"a": {"type": "boolean"}, "b": {"type": ["integer", "null"]}})
    use = required([told])
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    text = written(form, [("f", {"a": "A", "b": "B"})]).lstrip()
    for a, b in (("True", "None"), ("false", "null"), ("False", "-7")):
        assert allows(grammars, marked, constraint, text.replace("A", a).replace("B", b))
    for a, b in (("None", "1"), ("true", "True"), ("yes", "1")):
        assert not allows(grammars, marked, constraint, text.replace("A", a).replace("B", b))
