"""Functions in the style of the Berkeley Function Calling Leaderboard, called in every format."""

import random

import jsonschema
import pytest
from tests.allowed import allows
from tests.dialects import FORMATS, calls_of, cuts, in_json, parse, required, tool, written
from tests.function_schemas import REQUESTS, tool_of
from tests.marked import walk

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.events import Content
from quire.cluster.dialects.grammar import constrain
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer


def test_there_are_forty_functions_and_their_schemas_and_calls_are_valid() -> None:
    names: set[str] = set()
    for functions, calls in REQUESTS.values():
        schemas = {}
        for function in functions:
            sent = tool_of(function)["function"]
            jsonschema.Draft202012Validator.check_schema(sent["parameters"])
            schemas[sent["name"]] = sent["parameters"]
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])
        names |= schemas.keys()
    assert len(names) >= 40


@pytest.mark.quick_cells(60)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("asked", REQUESTS)
def test_the_calls_that_are_meant_are_read_and_allowed(
    form: str, asked: str, marked: Tokenizer, grammars: Grammars
) -> None:
    functions, calls = REQUESTS[asked]
    use = required([tool_of(function) for function in functions])
    text = written(form, calls).lstrip()
    assert calls_of(parse(form, [text], use.tools)) == calls
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    assert allows(grammars, marked, constraint, in_json(text, form, use.tools))


@pytest.mark.quick_cells(40)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("asked", REQUESTS)
def test_whatever_a_required_call_says_fits_its_schema(
    form: str, asked: str, marked: Tokenizer, grammars: Grammars
) -> None:
    functions, _ = REQUESTS[asked]
    use = required([tool_of(function) for function in functions])
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    schemas = {tool.name: tool.parameters for tool in use.tools}
    text = walk(grammars, marked, constraint, random.Random(f"{form} {asked}"))
    events = parse(form, [text], use.tools, has_form=True)
    assert not [event for event in events if isinstance(event, Content)], text
    called = calls_of(events)
    assert called
    for name, arguments in called:
        jsonschema.validate(arguments, schemas[name])
    for pieces in cuts(text, in_two=False):
        assert parse(form, pieces, use.tools, has_form=True) == events, pieces


@pytest.mark.parametrize("form", FORMATS)
def test_annotations_of_arguments_are_ignored(
    form: str, marked: Tokenizer, grammars: Grammars
) -> None:
    said = {
        "$comment": "x",
        "default": "a",
        "examples": ["b"],
        "deprecated": True,
        "readOnly": True,
    }
    said |= {"x-order": 3, "contentEncoding": "base64", "format": "phone"}
    inner = {"type": "object", "properties": {"b": {"type": "string", **said}}, **said}
    texts = {"a": {"type": "string", **said}, "c": {"enum": ["a", "b"], **said}}
    use = required([tool("f", {**texts, "d": inner})])
    dialect = choose_dialect(marked, tool_call_parser=form)
    constraint = constrain(dialect, use, None, reasons=False)
    assert constraint is not None
    grammars.check(constraint)
