"""Structured output of a model with random weights, checked with `jsonschema`, `json` and `re`."""

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.prepared import prepared

from quire import demo_model
from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams, StructuredOutputsParams
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.constraints import masks
from quire.worker.request.errors import ConstraintRefused, InvalidRequest
from quire.worker.request.outputs import CompletionOutput, TokenDelta
from quire.worker.request.structured import choice_constraint, json_constraint

PROMPT = "The harbor"
TOKENIZER = "tokenizer.json"

needs_native = pytest.mark.skipif(
    native.library() is None, reason="there is no native library on this machine"
)


@pytest.fixture(scope="module")
def checkpoint(make_llama: Any) -> Path:
    """Random weights with the demo model's tokenizer: 4096 tokens, nearly equally probable."""
    path: Path = make_llama(
        "structured",
        vocab_size=4096,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.02,
    )
    shutil.copy(demo_model.PATH / TOKENIZER, path / TOKENIZER)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_blocks=512, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def ending(llm: LLM) -> dict[int, float]:
    """Logit biases that end strings and lists soon, since random weights hardly ever would."""
    tokenizer = llm.get_tokenizer()
    biases = {tokenizer.encode(text)[-1]: 7.0 for text in ('"', "}", "]", ",", ":")}
    return biases | {1: 7.0}


def structured(
    llm: LLM, params: Sequence[SamplingParams], prompt: str = PROMPT
) -> list[CompletionOutput]:
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def one(llm: LLM, *, max_tokens: int = 64, seed: int = 1, **more: Any) -> CompletionOutput:
    given = {name: more.pop(name) for name in list(more) if name in ("json", "regex", "choice")}
    given |= {name: more.pop(name) for name in list(more) if name in ("grammar", "json_object")}
    asked = StructuredOutputsParams(**given)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=asked, **more)
    return structured(llm, [params])[0]


def schemas(number: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [_object(rng, 2) for _ in range(number)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "Größe", "a b", "id", "x-1", 'größte "Zahl"', "tags", "ok"], 3)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(4)),
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(-20, 20)
    plain: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randrange(1, 20)},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        {"type": "string", "format": "date"},
        {"enum": ["red", 3, None, "gr\u00fcn", 2.5]},
        {"const": {"fixed": [1, "two"]}},
        {"type": "integer", "minimum": least, "maximum": least + rng.randrange(300)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": ["integer", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 9}]},
    ]
    if depth > 0 and rng.random() < 0.5:
        items = {"items": _schema(rng, depth - 1), "minItems": 1, "maxItems": 3}
        return rng.choice([_object(rng, depth), {"type": "array", **items}])
    return rng.choice(plain)


def is_beginning_of_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        within_string = error.msg.startswith(("Unterminated string", "Invalid \\"))
        return within_string or (len(rest) <= 8 and not re.search(r"[{}\[\]]", rest))
    return True


def test_json_is_valid_for_its_schema(llm: LLM, ending: dict[int, float]) -> None:
    asked = schemas(30)
    params = [
        SamplingParams(
            max_tokens=160,
            seed=seed,
            structured_outputs=StructuredOutputsParams(json=schema),
            logit_bias=ending if seed % 3 else None,
        )
        for seed, schema in enumerate(asked)
    ]
    found = structured(llm, params)
    whole = [(o, schema) for o, schema in zip(found, asked, strict=True)]
    for output, schema in whole:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
        else:
            assert len(output.token_ids) == 160
            assert is_beginning_of_json(output.text), output.text
    assert sum(output.finish_reason == "stop" for output in found) >= 20
    assert len({output.text for output in found}) > 20


def test_any_object_and_recursion(llm: LLM, ending: dict[int, float]) -> None:
    output = one(llm, json_object=True, logit_bias=ending)
    assert isinstance(json.loads(output.text), dict)
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "required": ["kids"],
                "additionalProperties": False,
            }
        },
    }
    output = one(llm, json=json.dumps(tree), logit_bias=ending, seed=4)
    jsonschema.validate(json.loads(output.text), tree)


REGEXES = [
    r"[A-Z][a-z]{2,5}, \d{1,2}\.",
    r"(yes|no)( \w{1,7}){2}",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}",
    r"[äöü]{3}|[あ-ん]{2,4}",
    r"a{3,7}b?",
    r"[^x\n]{5,9}!",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_the_whole_output_matches_a_regex(llm: LLM, regex: str) -> None:
    for seed in range(3):
        output = one(llm, regex=regex, seed=seed)
        assert output.finish_reason == "stop"
        assert re.fullmatch(regex, output.text), output.text
        assert output.token_ids[-1] == 1


def test_one_of_several_texts(llm: LLM) -> None:
    choice = ["yes", 'no "thanks"', "vielleicht ä", "日本", "yes, please\n"]
    found = {one(llm, choice=choice, seed=seed).text for seed in range(30)}
    assert found <= set(choice)
    assert len(found) > 2


LARK = 'start: "(" inner ")"\ninner: /[0-9]/ | start start'
LLAMA_CPP = 'root ::= "(" inner ")"\ninner ::= [0-9] | root root'


def test_grammars_of_both_kinds(llm: LLM) -> None:
    lark = [one(llm, grammar=LARK, seed=seed) for seed in range(4)]
    for output in lark:
        text = output.text
        while re.search(r"\(\d\)", text):
            text = re.sub(r"\(\d\)\(\d\)", "1", re.sub(r"^\(\d\)$", "", text))
        assert output.finish_reason == "length" or text == ""
    llama_cpp = [one(llm, grammar=LLAMA_CPP, seed=seed) for seed in range(4)]
    assert [output.token_ids for output in llama_cpp] == [output.token_ids for output in lark]


def test_other_parameters_keep_their_meaning(llm: LLM) -> None:
    regex = r"[a-f]{1,40}"
    tokenizer = llm.get_tokenizer()
    early = [one(llm, regex=regex, seed=seed) for seed in range(8)]
    assert min(len(output.token_ids) for output in early) < 9
    for seed in range(4):
        late = one(llm, regex=regex, seed=seed, min_tokens=9)
        assert re.fullmatch(regex, late.text)
        assert len(late.token_ids) > 9
    # A constraint outweighs min_tokens and ignore_eos: it allows nothing after the end.
    ended = one(llm, regex="ab", min_tokens=20, ignore_eos=True)
    assert (ended.text, ended.finish_reason) == ("ab", "stop")
    stopped = one(llm, regex="abcd", stop_token_ids=[tokenizer.encode("b")[-1]], seed=3)
    assert stopped.text in ("a", "abcd")  # Unless it is part of a longer token.
    assert one(llm, regex="[ab]+;", stop=[";"]).finish_reason == "stop"
    allowed = [tokenizer.encode(letter)[-1] for letter in "ace"] + [1]
    assert re.fullmatch("[ace]+", one(llm, regex=regex, allowed_token_ids=allowed).text)
    biased = one(llm, regex=regex, logit_bias={allowed[0]: 100.0}, temperature=0.0)
    assert set(biased.text) == {"a"}
    penalised = one(llm, regex="(a|b|c|d)+", frequency_penalty=2.0, presence_penalty=2.0)
    assert re.fullmatch("[a-d]+", penalised.text)
    logged = one(llm, regex=regex, logprobs=2)
    assert logged.logprobs is not None
    assert logged.token_ids == one(llm, regex=regex).token_ids
    # Log-probabilities are the model's, unchanged by the grammar.
    assert any(max(e.rank or 0 for e in entry.values()) > 50 for entry in logged.logprobs)


def test_completions_of_one_prompt_differ_by_seed(llm: LLM) -> None:
    asked = StructuredOutputsParams(regex=r"[a-z]{3,9}")
    params = SamplingParams(n=4, seed=5, max_tokens=20, structured_outputs=asked)
    together = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    alone = [one(llm, regex=r"[a-z]{3,9}", seed=5 + index, max_tokens=20) for index in range(4)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def mixed_params(ending: dict[int, float]) -> list[SamplingParams]:
    """Parameters of constrained requests of all kinds and of unconstrained ones."""
    base = SamplingParams(max_tokens=90, seed=3)
    forms = [json_constraint(schema) for schema in schemas(6)]
    return [
        *(replace(base, structured_outputs=form, logit_bias=ending) for form in forms[:3]),
        *(replace(base, structured_outputs=form) for form in forms[3:]),
        replace(base, ignore_eos=True),
        replace(base, structured_outputs=choice_constraint(["one two three four", "five"])),
        replace(base, structured_outputs=forms[0], frequency_penalty=0.3),
        replace(base, temperature=0.0, ignore_eos=True),
        replace(base, temperature=0.0, structured_outputs=forms[1]),
    ]


SMALL = {"num_blocks": 20, "max_model_len": 128, "max_num_seqs": 16}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {**SMALL, "max_num_batched_tokens": 40},
    {**SMALL, "async_scheduling": True},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "async_scheduling": True},
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "tensor_parallel_size": 2},
]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, ending: dict[int, float]) -> list[list[int]]:
    settings: dict[str, Any] = {"enable_prefix_caching": False, "speculation": False}
    with LLM(checkpoint, num_blocks=512, num_threads=1, **settings) as llm:
        found = [structured(llm, [params])[0].token_ids for params in mixed_params(ending)]
        assert llm.engine.stats().num_drafted_tokens == 0
        return found


@pytest.mark.quick_cells(1)
@needs_native
@pytest.mark.parametrize("settings", VARIANTS)
def test_tokens_are_the_same_in_any_batch(
    checkpoint: Path,
    alone: list[list[int]],
    ending: dict[int, float],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_TRUSTED_WAIT_S", "_UNKNOWN_WAIT_S"):
        monkeypatch.setattr(masks, name, 600.0)  # No mask is late, however busy the machine is.
    with LLM(checkpoint, **{"num_blocks": 512, "num_threads": 1, **settings}) as llm:
        for _ in range(2):  # Then from the cache.
            found = structured(llm, mixed_params(ending))
            assert [output.token_ids for output in found] == alone
        stats = llm.engine.stats()
        is_small = "max_model_len" in settings
        assert (stats.num_preemptions > 0) == is_small
        if settings.get("max_num_seqs", 99) <= 3:
            assert stats.num_accepted_tokens > 50
        elif not is_small:  # No row sits out a step, whatever its next token depends on.
            assert stats.num_steps <= 2 * (max(map(len, alone)) + 4)


def drain(engine: GroupEngine) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


@needs_native
def test_resumed_from_any_token_the_same_tokens_follow(
    llm: LLM, alone: list[list[int]], ending: dict[int, float]
) -> None:
    prompt = llm.get_tokenizer().encode(PROMPT)
    for params, expected in zip(mixed_params(ending)[:6], alone, strict=False):
        for cut in range(0, len(expected) + 1, 5):
            request = prepared(
                f"{cut}", prompt, sampling=params, resumed_token_ids=as_token_ids(expected[:cut])
            )
            llm.engine.add_request(request)
        for request_id, deltas in drain(llm.engine).items():
            rest = [token for delta in deltas for token in delta.token_ids]
            assert expected[: int(request_id)] + rest == expected
            assert all(delta.error is None for delta in deltas)


PATTERNS = [{"pattern": f".*a.{{{n}}}b"} for n in range(18)]
MISREAD = 0.9452706955539223
HOSTILE: list[dict[str, str]] = [
    {"json": "{"},
    {"json": '{"type": "strin"}'},
    {"json": '{"not": {"type": "null"}}'},
    {"json": "[" * 100_000},
    {"json": '{"items":' * 3_000 + "true" + "}" * 3_000},
    {"json": json.dumps({"$ref": "#/$defs/missing"})},
    {"json": json.dumps({"type": "integer", "multipleOf": 62_615_533})},
    {"json": json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]})},
    {"json": json.dumps({"properties": {str(n): {"type": "integer"} for n in range(10_000)}})},
    {"json": json.dumps({"allOf": [{"pattern": f".*a.{{{n}}}b"} for n in range(30)]})},
    {"json": json.dumps({"allOf": [{"allOf": PATTERNS[:9]}, {"allOf": PATTERNS[9:]}]})},
    {
        "json": json.dumps(
            {
                "allOf": [{"properties": {"a": {"$ref": f"#/$defs/{n}"}}} for n in range(3)],
                "$defs": {n: {"allOf": PATTERNS[6 * n : 6 * n + 6]} for n in range(3)},
            }
        )
    },
    {"json": json.dumps({"const": [1, {"a": MISREAD}]})},
    {"json": json.dumps({"enum": ["a", 2**53 + 1]})},
    {"grammar": f'start: %json {{"enum": [{MISREAD}]}}'},
    {"grammar": 'start: %json {"type": "integer", "multipleOf": 62615533}'},
    {"json": json.dumps({"$ref": "https://example.com/x.json"})},
    {
        "json": json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"required": [f"a{n}"]}, {"required": ["b"]}]} for n in range(30)
                ]
            }
        )
    },
    {"regex": "("},
    {"regex": "(" * 50_000},
    {"regex": r"(?=x)y"},
    {"regex": r"(x)\1"},
    {"grammar": "start: missing"},
    {"grammar": "start: " + "(" * 50_000},
    {"grammar": "start: start"},
    {"grammar": "root ::= ("},
    {"grammar": "root ::= " + "(" * 50_000},
    {"grammar": "\x00"},
]


@pytest.mark.quick_cells(5)
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda each: str(each)[:40])
def test_a_hostile_constraint_fails_its_request_alone(llm: LLM, hostile: dict[str, str]) -> None:
    asked = StructuredOutputsParams(**hostile)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=8, seed=1, structured_outputs=asked)
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        structured(llm, [params])
    expected = one(llm, regex="[a-z]{8}").token_ids
    prompt = llm.get_tokenizer().encode(PROMPT)
    good = SamplingParams(
        max_tokens=64, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-z]{8}")
    )
    llm.engine.add_request(prepared("bad", prompt, sampling=params))
    llm.engine.add_request(prepared("good", prompt, sampling=good))
    found = drain(llm.engine)
    assert [(d.finish_reason, type(d.error)) for d in found["bad"]] == [
        ("abort", ConstraintRefused)
    ]
    assert [token for delta in found["good"] for token in delta.token_ids] == expected
    assert llm.engine.stats().num_held_blocks == 0


def test_an_engine_checks_what_came_through_no_gateway_and_takes_a_gateways_word(llm: LLM) -> None:
    made = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(700)}
    prompt = llm.get_tokenizer().encode(PROMPT)
    for is_checked in (False, True):
        deep = {"title": f"{is_checked}", "$ref": "#/$defs/0", "$defs": {**made, "700": {}}}
        params = SamplingParams(max_tokens=3, structured_outputs=json_constraint(deep))
        llm.engine.add_request(prepared("a", prompt, sampling=params, is_checked=is_checked))
        error = drain(llm.engine)["a"][-1].error
        assert error is None if is_checked else "nested too deeply: make it simpler" in str(error)


def test_one_that_takes_too_much_work_on_the_way_fails_its_request_alone(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot go on behind \d+ tokens: lexer error: too"):
        one(llm, regex="(a?){500}a{500}")
    assert llm.engine.stats().num_held_blocks == 0
    assert re.fullmatch("[a-z]{3}", one(llm, regex="[a-z]{3}").text)


def test_what_leaves_no_token_fails_its_request_alone(llm: LLM) -> None:
    digits = [llm.get_tokenizer().encode(str(digit))[-1] for digit in range(10)]
    letter = llm.get_tokenizer().encode("q")[-1]
    with pytest.raises(InvalidRequest, match="behind 0 tokens: none of the tokens"):
        one(llm, regex="[a-z]+", allowed_token_ids=digits)
    with pytest.raises(InvalidRequest, match="behind 1 tokens: none of the tokens"):
        one(llm, regex="q[0-9]", allowed_token_ids=[letter])
    assert llm.engine.stats().num_held_blocks == 0
    assert not llm.engine.has_work


def test_a_request_may_be_aborted_while_its_grammar_is_compiled(llm: LLM) -> None:
    schema = json_constraint({"enum": [str(number) for number in range(900)]})
    params = SamplingParams(structured_outputs=schema)
    llm.engine.add_request(prepared("gone", [5, 6], sampling=params))
    assert llm.engine.stats().num_waiting == 1
    assert llm.engine.abort("gone")
    assert not llm.engine.has_work
    assert llm.engine.stats().num_waiting == 0


def test_without_a_tokenizer_it_is_said(tiny_llama: Path) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with LLM(tiny_llama, num_blocks=32, num_threads=1) as llm:
        prompt: Any = {"prompt_token_ids": [5]}
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate(prompt, params, use_tqdm=False)
