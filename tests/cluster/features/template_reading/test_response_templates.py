"""Response templates of checkpoints: outputs are parsed as transformers itself parses them."""

import io
import json
import random
import re
import zipfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.dialects import Call, calls_of, conversations, cuts, parse, required, tool
from tests.examples import examples
from tests.marked import grammars_of, marked_tokenizer, walk
from tests.response_templates import CASES, FUNCTION, KNOWN, Case
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import parse_response

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.events import Content, Event, Reasoning
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.tools import check_tools
from quire.cluster.features.template_reading.response_template import calls_from
from quire.worker.request.errors import UnreadableTemplate
from quire.worker.text.reasoning import reasoning_from, reasoning_of
from quire.worker.text.template.response_template import Group, sequence_of
from quire.worker.text.tokenizer import Tokenizer

SAID = st.text(st.characters(codec="utf-8", categories=["L", "N", "Zs", "Cc"]), max_size=9)
Message = tuple[str, str, list[Call]]


def message_of(events: list[Event]) -> Message:
    """Reasoning, content and calls. Content is stripped of outer whitespace, which we keep."""
    reasoning, content = (
        "".join(event.text for event in events if isinstance(event, kind))
        for kind in (Reasoning, Content)
    )
    return reasoning, content.strip(), calls_of(events)


def transformers_message(text: str, case: Case, tools: list[dict[str, Any]]) -> Message:
    message = parse_response(text, case.template, prefix="", tools=[*tools])
    reasoning = message.get("reasoning_content", message.get("thinking", ""))
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return reasoning, message.get("content", ""), calls


def read(case: Case, pieces: list[str], tools: list[dict[str, Any]]) -> list[Event]:
    return parse(
        calls_from(case.template),
        pieces,
        check_tools(tools),
        reasoning=reasoning_from(case.template),
    )


def with_template(said: object, *, chat: str | None = None) -> Tokenizer:
    backend = marked_tokenizer('<|"|>')._backend
    return Tokenizer(backend, chat_template=chat, response_template=said)


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(60), deadline=None)
@given(SAID, SAID, conversations(), st.integers(0, 3))
def test_a_message_is_read_as_transformers_reads_it(
    name: str,
    reasoning: str,
    content: str,
    conversation: tuple[list[dict[str, Any]], list[Call]],
    num_calls: int,
) -> None:
    case = CASES[name]
    tools, calls = conversation
    calls = calls[:num_calls]
    assume(_is_exact(calls))
    if case.trims:
        for _, arguments in calls:
            texts = {key: each.strip() for key, each in arguments.items() if isinstance(each, str)}
            arguments.update(texts)
    text = case.write(reasoning.strip(), content.strip(), calls)
    message = message_of(read(case, [text], tools))
    assert message == transformers_message(text, case, tools)
    assert message == (reasoning.strip(), content.strip(), calls)


def _is_exact(value: object) -> bool:
    """Whether transformers reads all integers exactly: it reads those that a float64 holds."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_exact, value))
    return not isinstance(value, int) or abs(value) < 2**53


TOOLS = [
    tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
    tool("now", {}),
    tool("any", {"x": {"type": "array"}, "y": {"type": ["string", "null"]}}),
]
CALLS: list[Call] = [
    ("weather", {"city": 'Zürich, "old" {town}]\\n', "days": 3}),
    ("now", {}),
    ("any", {"x": [1, {"a": "b"}], "y": None}),
]


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("name", CASES)
def test_the_same_is_read_wherever_the_text_is_cut(name: str) -> None:
    case = CASES[name]
    whole = case.write("Hm. <", "So <t", CALLS)
    for text in (whole, whole[: len(whole) * 3 // 4], f"{whole} <", case.write("", "", CALLS[1:])):
        events = read(case, [text], TOOLS)
        for pieces in cuts(text):
            assert read(case, pieces, TOOLS) == events, pieces
    assert message_of(read(case, [whole], TOOLS)) == ("Hm. <", "So <t", CALLS)


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize("name", CASES)
def test_what_the_grammar_allows_is_a_call_for_transformers(name: str) -> None:
    case = CASES[name]
    strict = deepcopy(TOOLS)
    for each in strict:
        schema = each["function"]["parameters"]
        schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    strict[0]["function"]["parameters"]["properties"]["city"] = {"enum": ["Ulm", "Köln"]}
    strict[0]["function"]["parameters"]["properties"]["days"] |= {"minimum": 0, "maximum": 99}
    strict[2]["function"]["parameters"]["properties"] = {
        "x": {"type": "array", "items": {"type": "boolean"}},
        "y": {"type": "string"},
    }
    marked = with_template(case.template)
    dialect = choose_dialect(marked)
    assert dialect.calls is not None
    assert dialect.reasoning is not None
    assert (dialect.calls.name, dialect.reasoning.name) == (case.calls, case.reasoning)
    constraint = constrain(dialect, required(strict), None, reasons=False)
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in strict}
    for seed in range(8):
        text = walk(
            grammars_of(marked),
            marked,
            constraint,
            random.Random(seed),
            ends=('<|"|>', "<q>", "</arg_value>", "\n</parameter>", "</param>"),
        )
        ours = message_of(read(case, [text], strict))
        if not set(text) & set("\x01\x02"):  # transformers uses these as marks.
            theirs = transformers_message(text, case, strict)
            assert [call[0] for call in ours[2]] == [call[0] for call in theirs[2]]
            for called, arguments in theirs[2]:
                jsonschema.validate(arguments, schemas[called])
        assert ours[:2] == ("", "")
        assert ours[2]
        for called, arguments in ours[2]:
            jsonschema.validate(arguments, schemas[called])


def changed(said: dict[str, Any], path: str, value: object = None) -> dict[str, Any]:
    """The template with this value at a dotted path; without the key where it is ``None``."""
    copy: Any = deepcopy(said)
    *keys, last = path.split(".")
    inner = copy
    for key in keys:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return copy  # type: ignore[no-any-return]


XML, JSON, LIST = (CASES[name].template for name in ("qwen3_coder", "hermes", "mistral"))
CALLED = "fields.tool_calls"
LLAMA = {
    "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
    "close_pattern": r"\}<\|eot_id\|>\s*",
    "repeats": True,
    "content": "json",
    "transform": FUNCTION,
}
REFUSED: list[tuple[object, str]] = [
    ([JSON], "it must be an object, not"),
    (changed(JSON, "fields", {}), "fields={} cannot"),
    (changed(JSON, CALLED, "x"), "tool_calls='x' cannot"),
    (changed(JSON, CALLED), "it has no field tool_calls"),
    (changed(JSON, "version", 2), "version=2 cannot"),
    (changed(JSON, "vars", {}), "vars={} cannot"),
    (changed(JSON, f"fields.{'a' * 200}", 5), "^a{128}=5 cannot"),
    (changed(JSON, "fields.a\nb", 5), r"^a\\nb=5 cannot"),
    (changed(JSON, f"{CALLED}.vars", {}), "tool_calls.vars={} cannot"),
    (changed(JSON, "defaults", {"x": "y" * 40_000}), "it has 4.... characters: at most 32768"),
    (changed(JSON, "fields.citation", {"open": "["}), "the field 'citation' is not known"),
    (changed(JSON, "fields.content.open", "<answer>"), "content is marked too"),
    (changed(JSON, f"{CALLED}.close", ["</a>", "</b>"]), "tool_calls.close=.* cannot"),
    (changed(JSON, f"{CALLED}.close", " "), "tool_calls.close=' ' cannot"),
    (changed(JSON, f"{CALLED}.close", "x" * 200), "tool_calls.close=.* cannot"),
    (changed(JSON, f"{CALLED}.close", 5), "tool_calls.close=5 cannot"),
    (
        changed(JSON, f"{CALLED}.open_pattern", "(a+)+b"),
        r"open_pattern=.*: '\(a\+\)\+b' is more than",
    ),
    (changed(JSON, f"{CALLED}.open_pattern", r"(?=\[)"), "open_pattern=.* is more than texts"),
    (changed(JSON, f"{CALLED}.open_pattern", r"\s*"), "tool_calls.open=.* cannot"),
    (changed(JSON, f"{CALLED}.open_pattern", "a" * 600), "tool_calls.open_pattern=.* cannot"),
    (changed(JSON, f"{CALLED}.open_pattern", "<(?P<id>.*)>"), "tool_calls.open_pattern=.* cannot"),
    (
        changed(XML, f"{CALLED}.open_pattern", r"<f>(?P<name>\w+)-f"),  # No clear end.
        "tool_calls.open_pattern=.* cannot",
    ),
    (changed(JSON, f"{CALLED}.open_pattern"), "nothing opens tool_calls"),
    (changed(JSON, CALLED, LLAMA), "tool_calls.open=.* cannot"),
    (changed(JSON, f"{CALLED}.repeats"), "tool_calls is no list"),
    (changed(JSON, f"{CALLED}.content", "kv-lines"), "tool_calls.content=.*kv-lines.* cannot"),
    (changed(JSON, f"{CALLED}.content_args", {"unquoted_keys": True}), "unquoted_keys=True cannot"),
    (changed(JSON, f"{CALLED}.transform"), "tool_calls.transform=None cannot"),
    (changed(JSON, f"{CALLED}.transform.id", "{id}"), "tool_calls.transform=.* cannot"),
    (changed(LIST, f"{CALLED}.transform.function.name", "{a.b}"), "tool_calls.content=.* cannot"),
    (
        changed(XML, f"{CALLED}.content_args.tag_pattern", r"<(?P<key>\w+)>(?P<value>.*)</a>"),
        "tool_calls.content_args.tag_pattern=.* cannot",
    ),
    (
        changed(XML, f"{CALLED}.content_args.tag_pattern", r"<(?P<key>\w+)>(.*?)</(?P=key)>"),
        "tag_pattern=.* is more than texts",
    ),
    (
        changed(XML, f"{CALLED}.content_args.value_parser", {"name": "int"}),
        "tool_calls.content_args.value_parser=.* cannot",
    ),
    (
        changed(XML, f"{CALLED}.content_args.merge_duplicates", True),
        "tool_calls.content_args.merge_duplicates=True cannot",
    ),
    (
        changed(CASES["gemma4"].template, f"{CALLED}.content_args.string_delims", [["<", ">"]]),
        "tool_calls.content_args=.* cannot",
    ),
]


@pytest.mark.parametrize(("said", "reason"), REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(
    said: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnreadableTemplate, match=reason):
        calls_from(said)
    dialect = choose_dialect(with_template(said, chat="<tool_call> </think>"))
    assert dialect.calls is not None
    assert dialect.calls.name == "hermes"  # The format that the chat template shows.
    (told,) = (each for each in caplog.messages if each.startswith("calls of tools: the response"))
    assert "calls of tools: the response template is left aside: " in told


THOUGHT = "fields.reasoning_content"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (changed(JSON, THOUGHT), "it has no field of reasoning"),
        (changed(JSON, f"{THOUGHT}.open_pattern", r"(?=[\s\S]*?</think>)"), "is more than texts"),
        (changed(JSON, f"{THOUGHT}.open", ["<think>", "<b>"]), "reasoning_content.open=.* cannot"),
        (changed(JSON, f"{THOUGHT}.close_pattern", r"</a>\s*</b>"), "not between two fixed texts"),
        (changed(JSON, f"{THOUGHT}.close"), "reasoning_content.close=None cannot"),
        (changed(JSON, f"{THOUGHT}.content", "json"), "reasoning_content.content=.* cannot"),
        (changed(JSON, f"{THOUGHT}.content_args", {"strip": False}), "content=.* cannot"),
        (changed(JSON, f"{THOUGHT}.repeats", True), "reasoning_content.repeats=True cannot"),
    ],
)
def test_reasoning_that_cannot_be_expressed_is_refused_too(said: object, reason: str) -> None:
    with pytest.raises(UnreadableTemplate, match=reason):
        reasoning_from(said)
    tokenizer = with_template(said, chat="</think>")
    shown = choose_dialect(tokenizer).reasoning
    assert shown is not None
    assert shown.name == "think"
    assert reasoning_of(tokenizer) == shown


def test_a_response_template_outweighs_the_chat_template_and_an_operator_both() -> None:
    tokenizer = with_template(CASES["gemma4"].template, chat="<tool_call> </think>")
    said = choose_dialect(tokenizer)
    assert said.calls is not None
    assert said.reasoning is not None
    assert (said.calls.name, said.reasoning.name) == ("gemma4", "gemma4")
    assert '<|"|>' in said.special_tokens.values()
    assert reasoning_of(tokenizer) == said.reasoning
    wanted = choose_dialect(tokenizer, tool_call_parser="mistral", reasoning_parser="none")
    assert wanted.calls is not None
    assert (wanted.calls.name, wanted.reasoning) == ("mistral", None)


def test_it_is_read_where_transformers_saves_it(tmp_path: Path) -> None:
    make: Any = PreTrainedTokenizerFast
    saved = make(tokenizer_object=marked_tokenizer()._backend)
    saved.response_template = JSON
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.response_template == JSON
    with zipfile.ZipFile(io.BytesIO(tokenizer.as_zip())) as files:
        assert json.loads(files.read("tokenizer_config.json"))["response_template"] == JSON


PATHS = [
    *("start_anchor", "fields", "fields.content", CALLED, f"{CALLED}.transform"),
    *(f"{CALLED}.{key}" for key in ("open", "open_pattern", "close", "close_pattern", "content")),
    *(f"{CALLED}.{key}" for key in ("content_args", "repeats", "transform_each")),
    *(f"fields.thinking.{key}" for key in ("open", "open_pattern", "close", "content_args")),
]
MARKS = st.text(r"<>|/ab\s*+?.()[]{}P=^$\n\"", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | MARKS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(MARKS, each, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(CASES)), st.lists(st.tuples(st.sampled_from(PATHS), VALUES)))
def test_any_template_is_read_or_refused(name: str, changes: list[tuple[str, object]]) -> None:
    said = CASES[name].template
    for path, value in changes:
        try:
            said = changed(said, path, value)
        except (KeyError, TypeError, IndexError, AttributeError):
            continue
    dialect = choose_dialect(with_template(said))
    text = CASES[name].write("Hm.", "So", CALLS)
    whole, single = (
        parse(dialect.calls, pieces, check_tools(TOOLS), reasoning=dialect.reasoning)
        for pieces in ([text], list(text))
    )
    assert whole == single


@pytest.mark.parametrize("model", sorted(KNOWN))
def test_all_that_transformers_serves_by_a_template_are_read(model: str) -> None:
    assert calls_from(KNOWN[model]).name in ("hermes", "qwen3_coder", "gemma4")
    assert reasoning_from(KNOWN[model]).name in ("think", "gemma4")


PIECES = ["<a>", "\n", r"\|", r"\[", r"\n", r"\t", r"\s*", r"\n?", r"(?P<g>\w+)"]
PIECES.append(r"(?P<h>[^<\n]+)")
NOISE = [*"?*+|().^$}", "{2}", "[ab]", r"\b", r"\w", "(?:", "(?i)"]


@settings(max_examples=examples(500))
@given(st.lists(st.sampled_from([*PIECES * 3, *NOISE]), min_size=1, max_size=8))
def test_a_pattern_that_is_read_matches_what_it_is_read_as(pieces: list[str]) -> None:
    pattern = "".join(pieces)
    try:
        parts = sequence_of(pattern, place="x")
        compiled = re.compile(pattern, re.DOTALL)
    except (UnreadableTemplate, re.error):
        return
    names = {"g": "ab", "h": "c d"}
    text = "".join(
        part if isinstance(part, str) else names[part.name] if isinstance(part, Group) else ""
        for part in parts
    )
    if not re.search(r"\\[nt]\+", pattern):  # Less whitespace is accepted too.
        assert compiled.fullmatch(text) is not None
