"""The outputs that structural tags allow."""

import json
from typing import Any

import pytest
import tokenizers
from tests.allowed import allows

from quire.worker.request.errors import InvalidRequest
from quire.worker.request.structured import StructuredOutputsParams
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
TAGS = {"tags": [TAG, TAG | {"begin": "<f=yy>"}]}
ONE = {"at_least_one": True, "stop_after_first": True}
CALL = '<f=x>{"a": 1}</f>'
OTHER = '<f=yy>{"a": 2}</f>'


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer in which ``</t>`` and ``<f=`` are text, or special tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["</t>", "<f="] if request.param == "special" else []
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|end|>", *special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the weather"], trainer)
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[0])


def structures(**more: Any) -> dict[str, Any]:
    tags = [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}]
    return {"type": "structural_tag", "structures": tags, "triggers": ["<f="], **more}


def formatted(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


def triggered(**more: Any) -> dict[str, Any]:
    return formatted("triggered_tags", triggers=["<f="], **TAGS, **more)


@pytest.mark.parametrize(
    ("tag", "good", "bad"),
    [
        (structures(), ["", "Hm.", CALL, f"a{CALL} b {CALL}"], ["<f=z>", "<f=x>1", f"{CALL}<f=y"]),
        (triggered(), ["", f"{CALL}{OTHER}.", f"so {OTHER}"], ["<f=", "a <f=x>{}</f>"]),
        (triggered(at_least_one=True), [CALL, f"{OTHER} and {CALL}"], ["", f"a{CALL}"]),
        (triggered(stop_after_first=True), [CALL, f"a{CALL}", "a"], [f"{CALL}.", CALL + OTHER]),
        (triggered(**ONE), [CALL], ["a", f"a{CALL}"]),
        (
            formatted("tags_with_separator", separator=", ", **TAGS),
            ["", CALL, f"{CALL}, {OTHER}"],
            ["a", CALL + OTHER, f"{CALL}, "],
        ),
        (
            formatted(
                "tags_with_separator",
                separator=";",
                at_least_one=True,
                stop_after_first=True,
                **TAGS,
            ),
            [CALL, OTHER],
            ["", f"{CALL};{CALL}"],
        ),
        (
            formatted("sequence", elements=[THINK, {"type": "tag", **TAG}]),
            [f"<t></t>{CALL}", f"<t>a\n<b></t>{CALL}"],
            [CALL, "<t></t>", f"<t>{CALL}"],
        ),
        (
            formatted(
                "or",
                elements=[
                    {"type": "const_string", "value": "yes"},
                    {"type": "regex", "pattern": "[0-9]+/[0-9]"},
                    {"type": "json_schema", "json_schema": json.dumps(SCHEMA)},
                ],
            ),
            ["yes", "12/3", '{"a": 5}'],
            ["no", "yes12", "12", "{}"],
        ),
    ],
)
def test_what_is_allowed(
    tokenizer: Tokenizer,
    grammars: Grammars,
    tag: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    for given in (tag, json.dumps(tag)):
        constraint = StructuredOutputsParams(structural_tag=given).constraint
        for text in good:
            assert allows(grammars, tokenizer, constraint, text), text
        for text in bad:
            assert not allows(grammars, tokenizer, constraint, text), text


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        inner = {"type": "sequence", "elements": [inner]}
    return {"format": inner}


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("{", "structured_outputs=structural_tag: "),
        ("[]", "it must be an object"),
        ({"type": "structural_tag"}, "format=None must be an object"),
        (formatted("qwen"), "type='qwen' is not one of const_string, json_schema, any_text, regex"),
        (structures(triggers=["<g"]), "begin='<f=x>' begins with none of triggers"),
        (structures(triggers=[""]), "must be texts, none empty"),
        (structures(structures=[]), "tags must be a list of objects, not empty"),
        (formatted("tag", begin="a", content={"type": "any_text"}), "end=None must be a text"),
        (nested(40), "nested deeper than 32"),
        (formatted("json_schema", json_schema={"not": {}}), "not"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(
    grammars: Grammars, tag: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        grammars.compile(StructuredOutputsParams(structural_tag=tag).constraint)
