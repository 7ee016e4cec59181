"""JSON schemas: annotations are ignored, bounds enforced or refused. `jsonschema` is the oracle."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.allowed import allows
from tests.marked import walk

from quire.worker.request.errors import ConstraintRefused
from quire.worker.request.structured import Constraint, json_constraint, structural_constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer

SAID: dict[str, Any] = {
    **{"$comment": "x", "title": "t", "description": "d", "default": 1, "examples": [2]},
    **{"deprecated": True, "readOnly": True, "writeOnly": True, "x-order": {"format": 3}},
    **{"contentMediaType": "text/plain", "contentEncoding": "base64", "format": "phone"},
}
TEXT = {"type": "string", "enum": ["abc", "de"]}
ANNOTATED: dict[str, Any] = {
    **{"type": "object", "required": ["format", "both"], "additionalProperties": False},
    "properties": {"format": {**TEXT, **SAID}, "both": {"$ref": "#/$defs/both", **SAID}},
    "$defs": {"both": {"anyOf": [{**TEXT, **SAID}, {"type": "null", **SAID}], **SAID}},
    **SAID,
}
EDGES = [sign * edge for edge in (2**53, 2**63) for sign in (1, -1)] + [10**18, 0]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
bounds = st.sampled_from(EDGES).flatmap(lambda n: st.integers(n - 3, n + 3))
LEAST = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}


def test_annotations_leave_open_what_is_valid(marked: Tokenizer, grammars: Grammars) -> None:
    structure = {"begin": "<a>", "schema": ANNOTATED, "end": "</a>"}
    tag = structural_constraint({"structures": [structure], "triggers": ["<a>"]})
    for other, is_valid in (('"de"', True), ("null", True), ('"x"', False)):
        text = f'{{"format":"abc","both":{other}}}'
        jsonschema.Draft202012Validator.check_schema(ANNOTATED)
        validator = jsonschema.Draft202012Validator(ANNOTATED)
        assert validator.is_valid(json.loads(text)) == is_valid
        assert allows(grammars, marked, json_constraint(ANNOTATED), text) == is_valid
        assert allows(grammars, marked, tag, f"<a>{text}</a>") == is_valid


def test_formats_that_are_known_are_kept(marked: Tokenizer, grammars: Grammars) -> None:
    for form, text in {
        **{"date": "2024-02-29", "time": "10:00:00Z", "date-time": "2024-02-29T10:00:00Z"},
        **{"duration": "P1D", "email": "a@b.de", "hostname": "b.de", "uri": "http://b.de"},
        **{"ipv4": "1.2.3.4", "ipv6": "::1", "uuid": "123e4567-e89b-42d3-a456-426614174000"},
    }.items():
        asked = json_constraint({"type": "string", "format": form})
        assert allows(grammars, marked, asked, json.dumps(text))
        assert not allows(grammars, marked, asked, '"no such"')
        other = json_constraint({"type": "string", "format": f"{form}2"})
        assert allows(grammars, marked, other, '"no such"')


@example(kind="integer", asked={"minimum": 2**53 + 1, "maximum": 2**53 + 1}, seed=0)
@example(kind="integer", asked={"minimum": 10**18, "maximum": 2**64 - 1}, seed=0)
@given(
    kind=st.sampled_from(["integer", "number"]),
    asked=st.dictionaries(st.sampled_from(BOUNDS), bounds, min_size=1, max_size=2),
    seed=st.integers(0, 9),
)
def test_bounds_hold_or_are_refused(
    kind: str, asked: dict[str, int], seed: int, marked: Tokenizer, grammars: Grammars
) -> None:
    schema = {"type": kind, **asked}
    try:
        text = walk(grammars, marked, json_constraint(schema), random.Random(seed))
    except ConstraintRefused:
        return
    jsonschema.validate(json.loads(text, parse_float=Decimal), schema)


def test_bounds_of_integers_of_64_bits_and_without_sign_are_served(grammars: Grammars) -> None:
    for greatest in (2**53, 2**63 - 1, 2**64 - 1, 1.7976931348623157e308):
        grammars.check(json_constraint({"type": "integer", "minimum": 0, "maximum": greatest}))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"minimum": 2**53 + 1}, "/minimum: 9007199254740993 "),
        ({"items": {"exclusiveMaximum": 2**53}}, "/items/exclusiveMaximum: 9007199254740992 "),
        ({"maximum": 0.9452706955539223}, "/maximum: 0.9452706955539223 "),
        ({"maximum": float("inf")}, "/maximum: inf "),
        ({"multipleOf": True}, "multipleOf"),
        ({"allOf": [{"multipleOf": 7}, {"multipleOf": 1e-9}]}, "1E-9 and 7 would not be kept"),
        # These would end the process.
        (LEAST, "/minimum: -9223372036854775808 "),
        ({"$ref": "#/default", "default": LEAST}, "default holds no schema"),
        ({"$ref": "#/$defs/a/examples/0", "$defs": {"a": {"examples": [LEAST]}}}, "examples holds"),
    ],
)
def test_what_would_not_hold_is_refused_by_name(
    schema: dict[str, Any], named: str, grammars: Grammars
) -> None:
    in_lark = Constraint("grammar", f"start: %json {json.dumps(schema)}")
    for asked in (json_constraint(schema), in_lark):
        with pytest.raises(ConstraintRefused) as refused:
            grammars.check(asked)
        if asked is not in_lark:
            assert named in str(refused.value)


def test_a_property_may_be_called_as_a_keyword_of_values(grammars: Grammars) -> None:
    names = {"default": {"type": "integer"}, "b": {"$ref": "#/properties/default"}}
    grammars.check(json_constraint({"properties": names}))


BOOLEAN, INTEGER = {"type": "boolean"}, {"type": "integer"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


def within(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [schema]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"prefixItems": [BOOLEAN], "additionalItems": True}, ["[true,1]"], ['["b"]']),
        ({"prefixItems": [BOOLEAN], "additionalItems": False}, ["[true,1]"], ['["b"]']),
        ({"prefixItems": [BOOLEAN], "items": INTEGER, "additionalItems": BOOLEAN},
         ["[true,1]"], ["[1]", "[true,true]"]),
        ({**DRAFT_7, "prefixItems": [BOOLEAN]}, ["[true,1]"], ["[1]"]),
        ({**DRAFT_7, "prefixItems": [BOOLEAN], "items": INTEGER}, ["[true,1]"], ["[true,true]"]),
        ({"items": [BOOLEAN], "additionalItems": INTEGER}, ["[true,1]"], ["[true,true]"]),
        ({"additionalItems": INTEGER, "anyOf": [{}], "items": [BOOLEAN]},
         ["[true,1]"], ["[true,true]"]),
        ({"items": BOOLEAN, "additionalItems": INTEGER}, ["[true,true]"], ["[true,1]"]),
        ({"items": [{"$ref": "#/$defs/b"}], "$defs": {"b": BOOLEAN}}, ["[true,1]"], ["[1]"]),
        ({"minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"exclusiveMaximum": True, "allOf": [{"type": "integer"}], "maximum": 3}, ["2"], ["3"]),
        ({"maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"]),
        ({**DRAFT_7, "$defs": {"b": {"$id": "#b", **BOOLEAN}}, "$ref": "#b"}, ["true"], ["1"]),
        ({**DRAFT_7, "$defs": {"b": BOOLEAN}, "definitions": {"b": INTEGER}, "$ref": "#/$defs/b"},
         ["true"], ["1"]),
        ({"x-form": {"extends": "b"}, "ui": {"required": True}, **BOOLEAN}, ["true"], ["1"]),
    ],
)  # fmt: skip
def test_keywords_of_several_drafts_count_together(
    schema: dict[str, Any],
    allowed: list[str],
    refused: list[str],
    marked: Tokenizer,
    grammars: Grammars,
) -> None:
    kind = "array" if "[" in allowed[0] else "boolean" if allowed == ["true"] else "integer"
    schema = {**schema, "type": kind}
    in_lark = Constraint("grammar", f"start: %json {json.dumps(schema)}")
    for text in allowed + refused:
        assert allows(grammars, marked, json_constraint(schema), text) == (text in allowed)
        assert allows(grammars, marked, in_lark, text) == (text in allowed)
        if "$ref" not in json.dumps(schema):
            nested = json_constraint(within(schema))
            assert allows(grammars, marked, nested, f'{{"a":{text}}}') == (text in allowed)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"items": [BOOLEAN], "prefixItems": [INTEGER]}, "/prefixItems: "),
        ({"exclusiveMinimum": True}, "/exclusiveMinimum: true needs minimum"),
        ({"type": "integer", "required": True}, "/required: true"),
        ({"divisibleBy": 2}, "/divisibleBy: is not supported: write multipleOf"),
        ({**DRAFT_7, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**DRAFT_7, "$recursiveRef": "#"}, "recursiveRef"),
    ],
)
def test_keywords_that_no_draft_has_together_are_refused_by_name(
    schema: dict[str, Any], named: str, grammars: Grammars
) -> None:
    for asked in (json_constraint(schema), json_constraint(within(schema))):
        with pytest.raises(ConstraintRefused, match=named):
            grammars.check(asked)
