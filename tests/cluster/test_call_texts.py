"""Tool calls as models write them, including mistakes: the result of each text, cut anywhere."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects import FORMATS, cuts, parse, tool
from tests.examples import examples

from quire.cluster.dialects.events import CallArguments, CallBegun, CallEnded, Content, Event
from quire.cluster.dialects.strict_json import StrictJson
from quire.cluster.dialects.tools import check_tools

TOOLS = check_tools(
    [
        tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        tool("now", {}),
        tool(
            "calc",
            {
                "a": {"type": "number"},
                "on": {"type": "boolean"},
                "dims": {"type": "object"},
                "list": {"type": "array"},
                "opt": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        ),
    ]
)
D = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
D_END = "<｜tool▁calls▁end｜>"
V3 = f"{D[1]}function{D[2]}"
K = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>")
K_END, K_ENDS = "<|tool_call_end|>", "<|tool_calls_section_end|>"
H = "<|channel|>commentary to=functions."
H_JSON = " <|constrain|>json<|message|>"
NOW = ("now", "{}")
ROME = ("weather", '{"city": "Rome"}')
CUT = ("weather", '{"city": "Rome"', "cut")
ARGS = '{"city": "Rome"}'
GIVEN = '{"name": "weather", "arguments": {"city": "Rome"}}'
GIVEN_NOW = '{"name": "now", "arguments": {}}'

Part = str | tuple[str, ...]
# Text and its parse: content, and calls' names and arguments, with "cut" for incomplete ones.
# Without a parse, the whole text is content.
CASES: dict[str, list[tuple[str, list[Part]]]] = {
    "deepseek_v3": [
        (
            f"{D[0]}{V3}weather\n```json\n{ARGS[:-1]}\n```{D[3]}{D_END}",
            [("weather", '{"city": "Rome"\n', "cut")],
        ),
        (f'{D[0]}{V3}weather\n```json\n{{"city": "Rome",}}\n```{D[3]}{D_END}', [ROME]),
        (f"{D[0]}{V3}now\n```json\n\n```{D[3]}{D_END}", [NOW]),
        (f"So {V3}now\n```json\n{{}}\n```{D[3]}", ["So", NOW]),
        (f"{D[0]}function{D[2]}now\n```json\n{{}}\n```{D_END}", []),
        (f"{D[1]}{D[1]} {D[1]}function", []),
    ],
    "deepseek_v31": [
        (f"{D[0]}{D[1]}now{D[2]}{D[3]}{D_END}", [NOW]),
        (
            f"{D[0]}{D[1]}weather{D[2]}{ARGS[:-1]}{D[3]}{D[1]}now{D[2]}{{}}{D[3]}{D_END} after",
            [CUT, NOW, " after"],
        ),
        (f"So {D[1]}now{D[2]}{{}}{D[3]}", ["So", NOW]),
        (f"{D[1]}gone{D[2]}{{}}{D[3]}", []),
        (f"{D[1]}{D[1]}", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{GIVEN}, {GIVEN_NOW}] bye", [ROME, NOW, " bye"]),
        (f"[TOOL_CALLS] [{GIVEN}\n{GIVEN_NOW}]", [ROME, NOW]),
        (f"[TOOL_CALLS] [{GIVEN[:-1]}", [(*ROME, "cut")]),
        (f"[TOOL_CALLS] {GIVEN}", []),
        (f"[TOOL_CALLS]weather{ARGS}[TOOL_CALLS]now{{}}", [ROME, NOW]),
        ("[TOOL_CALLS]now nothing", []),
        ("[TOOL_CALLS]now null", [NOW]),
    ],
    "mistral_v11": [
        (f"[TOOL_CALLS]weather{ARGS}", [ROME]),
        ("[TOOL_CALLS]weather[ARGS]", []),
        (f"[TOOL_CALLS]now[ARGS][TOOL_CALLS]weather[ARGS]{ARGS} bye", [NOW, ROME, " bye"]),
        (f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{ARGS}", [ROME]),
    ],
    "glm45": [
        ("I look. <tool_call>now</tool_call> after", ["I look.", NOW, " after"]),
        (
            "<tool_call>calc<arg_key>list</arg_key><arg_value>['x','y']</arg_value>"
            "<arg_key>dims</arg_key><arg_value>{'a': True,}</arg_value></tool_call>",
            [("calc", '{"list": ["x", "y"], "dims": {"a": true}}')],
        ),
        (
            '<tool_call>calc<arg_key>list</arg_key><arg_value>["a\nb", 1,]</arg_value>'
            "<arg_key>on</arg_key><arg_value>TRUE</arg_value></tool_call>",
            [("calc", '{"list": ["a\\nb", 1], "on": true}')],
        ),
        (
            "<tool_call>calc<arg_key>a</arg_key><arg_value>5</arg_value>",
            [("calc", '{"a": 5', "cut")],
        ),
        (
            "<tool_call>calc<arg_key>a</arg_key><arg_value>five</arg_value></tool_call>",
            [("calc", '{"a": "five"}', "cut")],
        ),
        (
            "<tool_call>calc<arg_key>list</arg_key><arg_value>['x",
            [("calc", '{"list": ["x', "cut")],
        ),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            [("weather", '{"city": "Rome", "days": 2}')],
        ),
        ("<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>", [ROME]),
        ("<tool_call><function=weather>\n<parameter=city>\nRome\n</function></tool_call>", [ROME]),
        (
            "<tool_call><function=weather>\n<parameter=city>\nRome\n</parameter></tool_call>.",
            [ROME, "."],
        ),
        ("<tool_call><function=weather>\n<parameter=city>\nRome\n</parameter>", [CUT]),
        (
            "<tool_call>\n<function=now>\n</function>\n<function=weather>\n<parameter=city>\nRome"
            "\n</parameter>\n</function>\n</tool_call>",
            [NOW, ROME],
        ),
        (
            "<tool_call>\n<function=calc>\n<parameter=list>\n['x','y']\n</parameter>\n"
            "<parameter=opt>\nNone\n</parameter>\n</function>\n</tool_call>",
            [("calc", '{"list": ["x", "y"], "opt": null}')],
        ),
        ("<tool_call>\n<function=weather\n<parameter=city>\na\n</parameter>\n</function>", []),
        ("<function=<function=gone>", []),
    ],
    "kimi_k2": [
        (
            f"{K[0]}{K[1]}functions.weather:0{K[2]}{ARGS[:-1]}{K_END}"
            f"{K[1]}functions.now:1{K[2]}{{}}{K_END}{K_ENDS}",
            [CUT, NOW],
        ),
        (
            f"{K[0]}{K[1]}functions.gone.0{K[2]}{{}}{K_END}{K[1]}functions.now:1{K[2]}{{}}{K_END}",
            [f"{K[0]}{K[1]}functions.gone.0{K[2]}{{}}{K_END}", NOW],
        ),
        (f"{K[0]} hm {K[1]}functions.now:0{K[2]}{{}}{K_END}{K_ENDS}", [f"{K[0]} hm", NOW]),
        (f"{K[1]}functions.now:0{K[2]}{{}}{K_END}", [NOW]),
        (f"{K[0]}{K[1]}now{K[2]}{{}}{K_END}{K_ENDS}", [NOW]),
        (f"{K[0]}{K[1]}functions.now:0{K[2]}{K_END}{K_ENDS}", [NOW]),
        (f"{K[1]}{K[1]}now", []),
    ],
    "granite": [
        (f"<tool_call> [{GIVEN}]", [ROME]),
        (f"Hm.\n<|tool_call|>[{GIVEN}\n{GIVEN_NOW}]\nBye.", ["Hm.", ROME, NOW, "\nBye."]),
        (f"<|tool_call|> {GIVEN}", []),
    ],
    "hermes": [
        (f"<tool_call>{GIVEN[:-2]},}}}}</tool_call>", [ROME]),
        (f"<tool_call>{GIVEN[:-1]}</tool_call>!", [ROME, "!"]),
        (f"<tool_call>{GIVEN[:-2]}</tool_call>", [CUT]),
        (f"<tool_call>{GIVEN[:-1]}", [(*ROME, "cut")]),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
        (
            """<tool_call>{"name": "calc", "arguments": {'a': 1, 'on': True}}</tool_call>""",
            [("calc", '{"a": 1, "on": true}')],
        ),
        (
            '<tool_call>{"name": "calc", "arguments": {"a": NaN}}</tool_call>',
            [("calc", '{"a": ', "cut")],
        ),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "Rome" // c\n}}</tool_call>',
            [("weather", '{"city": "Rome" ', "cut")],
        ),
        (
            f"<tool_call>{GIVEN_NOW}\n{GIVEN}</tool_call>",
            [NOW, ROME],
        ),
        ("<tool_call>{'name': 'now', 'arguments': {}}</tool_call>", []),
        (f"<tool_call>```json\n{GIVEN}\n```</tool_call>", [ROME]),
        (f"<tool_call>\n[{GIVEN}, {GIVEN_NOW}]\n</tool_call> So.", [ROME, NOW, "\n So."]),
        (f"<tool_call>{GIVEN}, and</tool_call>", [ROME, ", and"]),
        ("<tool_call>[1]</tool_call>", []),
    ],
    "llama3_json": [
        (f"{GIVEN_NOW}\n{GIVEN} bye", [NOW, ROME, " bye"]),
        (f"{GIVEN_NOW} ; {GIVEN}", [NOW, ROME]),
        ('{"name": "now", "parameters": {bad}', [("now", "{", "cut")]),
        ('{"name": "now", "parameters": null}', [NOW]),
        (f"Here: {GIVEN_NOW}", []),
        (f"[{GIVEN_NOW}]", []),
    ],
    "pythonic": [
        ("[weather(city='a\nb')]", [("weather", '{"city": "a\\nb"}')]),
        (r"[weather(city='Ed\'s\" hut')]", [("weather", '{"city": "Ed\'s\\" hut"}')]),
        ("[weather(city=Rome)]", [ROME]),
        (
            "[calc(a=-1.5, on=true, opt=null, list=['a'],), now()] bye",
            [("calc", '{"a": -1.5, "on": true, "opt": null, "list": ["a"]}'), NOW, " bye"],
        ),
        ("[weather(city='x'", [("weather", '{"city": "x"', "cut")]),
        ("[calc(list=['a', {'b': (", [("calc", '{"list": ["a", {"b": ', "cut")]),
        ("[calc(on=Tr", [("calc", '{"on": ', "cut")]),
        ("[calc(a=-1.", [("calc", '{"a": -1.', "cut")]),
        ("[weather('x')]", []),
        ("now()", []),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:calc{a:<escape>42<escape>,on:<escape>true<escape>}"
            "<end_function_call>",
            [("calc", '{"a": 42, "on": true}')],
        ),
    ],
    "gemma4": [
        (
            "<|tool_call>call:weather{city:New Rome}<tool_call|>",
            [("weather", '{"city": "New Rome"}')],
        ),
        ('<|tool_call>call:calc{a:<|"|>4<|"|>}<tool_call|>', [("calc", '{"a": 4}')]),
        ("<|tool_call>:now{}<tool_call|><|tool_call>now{}<tool_call|>", [NOW, NOW]),
        ("<|tool_call>call:now<tool_call|>", []),
        (
            '<|tool_call>call:calc{a:<|"|>four<|"|>}<tool_call|>',
            [("calc", '{"a": "four"}', "cut")],
        ),
    ],
    "harmony": [
        (f"{H}weather{H_JSON}{ARGS[:-1]},}}<|call|>", [ROME]),
        (f"{H}weather{H_JSON}{ARGS[:-1]}<|call|>", [CUT]),
        (f"{H}weather json<|message|>{ARGS}", [ROME]),
    ],
}


def events_of(text: str, parts: list[Part]) -> list[Event]:
    events: list[Event] = []
    num_calls = 0
    for part in parts or [text]:
        if isinstance(part, str):
            events.append(Content(part))
            continue
        name, arguments, *cut = part
        events += [CallBegun(num_calls, name), CallArguments(num_calls, arguments)]
        events.append(CallEnded(num_calls, is_whole=not cut))
        num_calls += 1
    return events


@pytest.mark.quick_cells(30)
@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [(form, text, parts) for form, cases in CASES.items() for text, parts in cases],
)
def test_calls_are_read_as_far_as_they_are_clear(form: str, text: str, parts: list[Part]) -> None:
    expected = events_of(text, parts)
    for pieces in ([text], *cuts(text)):
        told = parse(form, pieces, TOOLS)
        events = [
            replace(each, given_id="") if isinstance(each, CallBegun) else each for each in told
        ]
        assert events == expected, pieces


@pytest.mark.parametrize("form", [form for form, each in FORMATS.items() if each.implied])
def test_where_calls_have_a_form_an_implied_mark_is_text(form: str) -> None:
    begun = FORMATS[form].implied
    text = f"{begun}now>\n</function>"
    assert parse(form, [text], TOOLS, has_form=True) == [Content(text)]


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("a\"'\\\n,é"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a'\\"), inner, max_size=3),
    max_leaves=8,
)


def strict(pieces: list[str]) -> tuple[str, bool]:
    read = StrictJson()
    return "".join(map(read.strict, pieces)), read.is_whole


@settings(max_examples=examples(100), deadline=None)
@given(VALUES.filter(lambda value: isinstance(value, dict | list | str)), st.booleans())
def test_json_stays_as_it_is(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=1)
    for pieces in ([text], list(text)):
        assert strict(pieces) == (text, True)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*"{}[]:,\"'\\u1-. \n\x00a<é", "True", "null", "NaN", '"a"', '"a": ', "'b'", "\\u00e9"]
        ),
        max_size=14,
    )
)
def test_what_is_whole_is_json_and_no_cut_makes_a_difference(pieces: list[str]) -> None:
    text, is_whole = strict(pieces)
    assert strict(["".join(pieces)]) == strict(list("".join(pieces))) == (text, is_whole)
    if is_whole:
        json.loads(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, ]", "[1]"),
        ("{'a': 'it\\'s \"b\"',}", '{"a": "it\'s \\"b\\""}'),
        ('["\t\\x\\u12"]', '["\\t\\\\x\\\\u12"]'),
        ("[True, False, None]", "[true, false, null]"),
    ],
)
def test_what_json_does_not_allow_is_mended(text: str, expected: str) -> None:
    assert strict([text]) == strict(list(text)) == (expected, True)


@pytest.mark.parametrize(
    "text", ["[1,,2]", "[,]", '{"a"}', '{"a": }', "[01]", "{]", "[1] 2", "[NaN]"]
)
def test_there_is_no_more_of_it_where_the_text_is_no_json(text: str) -> None:
    told, is_whole = strict([text])
    assert not is_whole
    assert len(told) < len(text)
