"""Grammars that would take llguidance long or crash it are refused by its fuel limit, or by the
death of the process that compiles them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import demo_model
from quire.worker.request.errors import ConstraintRefused, InvalidRequest
from quire.worker.request.structured import (
    Constraint,
    StructuredOutputsParams,
    choice_constraint,
    json_constraint,
    structural_constraint,
)
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.grammar.process import GrammarProcess
from quire.worker.text.tokenizer import Tokenizer

SLOW = [f"(.|\\n)*a.{{{n}}}b(.|\\n)*" for n in range(22)]
"""Each matches texts with the letters ``a`` and ``b`` n letters apart."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(demo_model.PATH)
    return Grammars(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[1])


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    tokenizer = Tokenizer.load(demo_model.PATH)
    process = GrammarProcess(tokenizer, vocab_size=tokenizer.vocab_size)
    yield process
    process.close()


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern)


def lark(*lines: str) -> Constraint:
    return Constraint("grammar", "\n".join(lines))


def chain(number: int, line: Callable[[int], str], last: str) -> Constraint:
    """A schema of definitions that each refer to the next."""
    return lark("start: r0", *map(line, range(number)), f"r{number}: {last}")


def references(number: int, schema: Callable[[Any], Any], ref: str = "#/$defs/{}") -> Constraint:
    """Schemas that each refer to the next."""
    made = {str(n): schema({"$ref": ref.format(n + 1)}) for n in range(number)}
    return json_constraint({"$ref": ref.format(0), "$defs": {**made, str(number): {}}})


def all_of(schema: Callable[[int], Any], **more: Any) -> Constraint:
    return json_constraint({"allOf": [schema(n) for n in range(14)], **more})


def merged(make: Callable[[Any, Any], Any], last: Any = True) -> Constraint:
    """Twenty schemas that each refer to the next one by two properties."""
    plain = {name: {"type": "object"} for name in "ab"}
    made = {
        str(n): make({name: {"$ref": f"#/$defs/{n + 1}"} for name in "ab"}, plain)
        for n in range(20)
    }
    return json_constraint({"$ref": "#/$defs/0", "$defs": {**made, "20": last}})


def pattern(n: int) -> dict[str, str]:
    return {"pattern": SLOW[n]}


ENDED = "compiling it takes more than 1 s or 2 GiB, or it is nested too deeply: make it simpler"
REFUSED: dict[str, tuple[Constraint, str | None]] = {
    "intersections": (
        lark("start: T", "T: " + " & ".join(f"/{each}/" for each in SLOW)),
        ENDED,
    ),
    "intersections of several terminals": (
        lark("start: A0", *(f"A{n}: /{SLOW[n]}/ & A{n + 1}" for n in range(9)), "A9: /a*/"),
        "fuel",
    ),
    "complements": (
        lark("start: T", "T: /[ab]{30}/" + "".join(f" & ~/{each}/" for each in SLOW[:10])),
        ENDED,
    ),
    "hard to tell from nothing": (
        lark("start: T", "T: /[ab]{30}/" + "".join(f" & ~/{each}/" for each in SLOW[5:9])),
        "fuel",
    ),
    "a long text in few characters": (regex("(a{999}){999}"), None),
    "a long text by doubling": (
        lark("start: T0", *(f"T{n}: T{n + 1} T{n + 1}" for n in range(30)), 'T30: "a"'),
        "too big",
    ),
    "a long text in llama.cpp's syntax": (
        lark("root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(30)), 'r30 ::= "a"'),
        ENDED,
    ),
    "optional parts": (regex("a?b?" * 2_000), "fuel"),
    "optional terminals": (
        lark("start: T", "T: " + "A?B?" * 2_000, "A: /a/", "B: /b/"),
        "fuel",
    ),
    "optional parts in a schema": (
        json_constraint({"type": "string", "pattern": "a?b*" * 2_000}),
        None,
    ),
    "classes of Unicode": (regex(r"\P{L}" * 9_000), None),
    "a chain of rules": (chain(4_000, lambda n: f"r{n}: r{n + 1}", '"a"'), ENDED),
    "a cycle of rules": (
        chain(3_000, lambda n: f'r{n}: r{n + 1} | "a"', "r0"),
        ENDED,
    ),
    "a chain of rules over lines": (
        chain(4_000, lambda n: f"r{n}[lazy // ]\n]: (\nr{n + 1}\n)", "/a/"),
        "Expected token",
    ),
    "a chain of grammars": (
        chain(2_000, lambda n: f'r{n}: %lark {{\nstart: "b"\n}} r{n + 1}', '"a"'),
        ENDED,
    ),
    "a chain of terminals": (
        lark(
            "start: T0", *(f'T{n}: (/[xy]*/ | T{n + 1} "z")*' for n in range(2_000)), "T2000: /a/"
        ),
        ENDED,
    ),
    "many optional symbols": (lark("start: " + '"a"? ' * 9_000), "too big"),
    "many rules of many alternatives": (
        lark(
            "start: e0",
            *(f"e{n}: " + " | ".join(f"e{m}" for m in range(60)) + ' | "a"' for n in range(60)),
        ),
        None,
    ),
    "rules in llama.cpp's syntax": (
        lark("root ::= r0", *(f'r{n} ::= "a" r{n + 1}' for n in range(999)), 'r999 ::= "a"'),
        "1001 rules are too many",
    ),
    "no root": (lark("a ::= [a]"), "has no rule 'root'"),
    "half an escape": (lark('root ::= "\\'), "is no escape"),
    "a chain of references": (references(2_000, lambda ref: {"items": ref}), ENDED),
    "a chain of escaped references": (
        references(2_000, lambda ref: {"items": ref}, "#/%24defs/{}"),
        ENDED,
    ),
    "a chain of references by a name": (
        json_constraint(
            {
                "$ref": "#a0",
                "$defs": {
                    str(n): {"$anchor": f"a{n}", "items": {"$ref": f"#a{n + 1}"}}
                    for n in range(1_500)
                },
            }
        ),
        ENDED,
    ),
    "a chain of references in one definition": (
        json_constraint(
            {
                "$ref": "#/$defs/a/anyOf/0",
                "$defs": {
                    "a": {
                        "anyOf": [{"items": {"$ref": f"#/$defs/a/anyOf/{n}"}} for n in range(1_500)]
                    }
                },
            }
        ),
        None,
    ),
    "patterns of all properties": (
        all_of(
            lambda n: (
                {"additionalProperties": pattern(n)} if n % 2 else {"properties": {"x": pattern(n)}}
            )
        ),
        "Unable to determine",
    ),
    "patterns of all items": (
        all_of(lambda n: {"items": pattern(n)} if n % 2 else {"prefixItems": [pattern(n)]}),
        "Unable to determine",
    ),
    "patterns behind references into allOf": (
        all_of(
            lambda n: {"$ref": f"#/$defs/{n}/allOf/0"},
            **{"$defs": {str(n): {"allOf": [pattern(n)]} for n in range(14)}},
        ),
        "Unable to determine",
    ),
    "patterns behind references by name": (
        all_of(
            lambda n: {"$ref": f"#a{n}"},
            **{"$defs": {str(n): {"$anchor": f"a{n}", **pattern(n)} for n in range(14)}},
        ),
        "Unable to determine",
    ),
    "patterns of names": (
        json_constraint(
            {
                "patternProperties": {f"^x{n}y*$": {"type": "integer"} for n in range(300)},
                "additionalProperties": {"type": "string"},
            }
        ),
        ENDED,
    ),
    "formats": (
        json_constraint(
            {"anyOf": [{"format": "uri", "maxLength": number} for number in range(500)]}
        ),
        None,
    ),
    "bounds": (
        json_constraint(
            {"properties": {f"{n}": {"minimum": -n / 8, "maximum": n / 16} for n in range(400)}}
        ),
        None,
    ),
    "objects as values": (
        json_constraint({"enum": [{"a": [n]} for n in range(2_000)]}),
        None,
    ),
    "schemas of one grammar together": (
        lark(
            "start: "
            + " | ".join(
                f'%json {{"type": "integer", "multipleOf": {9_973 + n}}}' for n in range(9)
            )
        ),
        None,
    ),
    "objects merged again and again": (
        merged(lambda refs, plain: {"allOf": [{"properties": refs}, {"properties": plain}]}),
        ENDED,
    ),
    "objects merged with what is beside": (
        merged(lambda refs, plain: {"properties": refs, "allOf": [{"properties": plain}]}),
        ENDED,
    ),
    "references merged with what is beside": (
        merged(
            lambda refs, _: {
                "properties": {n: {**ref, "minProperties": 1} for n, ref in refs.items()}
            }
        ),
        ENDED,
    ),
    "a cycle of merged objects": (
        merged(
            lambda refs, plain: {"allOf": [{"properties": refs}, {"properties": plain}]},
            last={"properties": {"a": {"$ref": "#/$defs/0"}}},
        ),
        ENDED,
    ),
}


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize("family", REFUSED)
def test_a_hostile_constraint_is_refused_or_takes_little(
    process: GrammarProcess, grammars: Grammars, family: str
) -> None:
    constraint, words = REFUSED[family]
    if words is not None:
        with pytest.raises(ConstraintRefused, match=f"structured_outputs=.*{words}"):
            process.check(constraint)
        return
    try:
        process.check(constraint)
    except ConstraintRefused:
        return  # As on a slow machine.
    assert grammars.compile(constraint).matcher().mask_W.any()


def tool(number: int) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "format": "date", "description": "When to begin."}
        for name in ("day", "other")
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": f"<tool_{number}>", "content": content, "end": "</tool>"}


HONEST: dict[str, Constraint] = {
    "10,000 values": json_constraint({"enum": [f"value {n}" for n in range(10_000)]}),
    "10,000 choices": choice_constraint([f"value {n}" for n in range(10_000)]),
    "20,000 alternatives": regex("|".join(map(str, range(20_000)))),
    "600 properties": json_constraint({"properties": {f"p{n}": {} for n in range(600)}}),
    "128 tools": structural_constraint(
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<tool_"],
                "tags": [tool(n) for n in range(128)],
            }
        }
    ),
    "rules of a password": json_constraint(
        {
            "allOf": [{"pattern": each} for each in ("[a-z]", "[A-Z]", "[0-9]", "[!?%&]")],
            "minLength": 8,
            "maxLength": 64,
        }
    ),
    "any of 3,500 letters": regex("[" + "".join(chr(0x4E00 + 2 * n) for n in range(3_500)) + "]*"),
    "a recursive schema": references(40, lambda ref: {"anyOf": [ref, {"$ref": "#"}]}),
    "a tree of references that nothing is merged with": merged(
        lambda refs, _: {"properties": {n: {"allOf": [ref], "title": n} for n, ref in refs.items()}}
    ),
    "a text without five others": lark(
        "start: T",
        "T: /(.|\\n)*/" + "".join(f" & ~/(.|\\n)*word {n}(.|\\n)*/" for n in range(5)),
    ),
    "attributes": lark(
        'start: a b c "0".."9" D{2,3}',
        'a[suffix="]:"]: /[^:]*/',
        "b[lazy, max_tokens=3]: /b+:/ // c: d",
        '?c: ("x" ":")',
        "  | a",
        "_E: /e/i",
        "D: _E | F",
        "F: /[:\\/\\]]/",
        "%ignore /[ :]+/",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_large_by_its_text_is_compiled(
    process: GrammarProcess, grammars: Grammars, name: str
) -> None:
    process.check(HONEST[name])
    matcher = grammars.compile(HONEST[name]).matcher()
    matcher.fill()
    assert matcher.error is None
    assert matcher.mask_W.any()


def test_a_choice_of_many_can_be_ended(grammars: Grammars) -> None:
    choice = [f"value {n}" for n in range(3_000)]
    text = Tokenizer.load(demo_model.PATH).encode("value 2718")[1:]
    tokens = [token for token in text if token > 1]
    matcher = grammars.compile(choice_constraint(choice)).matcher(tokens)
    assert matcher.error is None
    assert matcher.mask_W[0] >> 1 & 1


def test_a_pattern_of_a_tag_does_not_end_itself(grammars: Grammars) -> None:
    def tagged(text: str) -> Constraint:
        return structural_constraint({"format": {"type": "regex", "pattern": text}})

    grammars.compile(tagged(r"a\\/ & /b"))
    with pytest.raises(InvalidRequest, match="half an escape"):
        grammars.compile(tagged("a\\"))
    params = StructuredOutputsParams(structural_tag={"format": {"type": "regex", "pattern": "a/b"}})
    grammars.compile(params.constraint)


def test_what_the_process_passes_is_nested_half_as_deep_as_what_ends_this_one(
    process: GrammarProcess, grammars: Grammars
) -> None:
    deep = references(700, lambda ref: {"items": ref})
    with pytest.raises(ConstraintRefused, match=ENDED):
        process.check(deep)
    grammars.compile(deep)
    process.check(references(299, lambda ref: {"prefixItems": [ref]}))
