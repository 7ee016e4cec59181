"""What would take llguidance long, or end the process, is refused by a count or by its fuel."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import demo_model
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.structured import (
    Constraint,
    StructuredOutputsParams,
    choice_constraint,
    json_constraint,
    structural_constraint,
)
from quire.worker.text.grammar import Grammars
from quire.worker.text.lark_work import check_lark
from quire.worker.text.regex_work import regex_size
from quire.worker.text.tokenizer import Tokenizer
from quire.worker.text.work import Work, check_chain

SLOW = [f"(.|\\n)*a.{{{n}}}b(.|\\n)*" for n in range(22)]
"""Each matches what has the letters ``a`` and ``b`` n letters apart."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.load(demo_model.PATH)
    return Grammars(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[1])


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern)


def lark(*lines: str) -> Constraint:
    return Constraint("grammar", "\n".join(lines))


def chain(number: int, line: Callable[[int], str], last: str) -> Constraint:
    """Definitions that each refer to the next one."""
    return lark("start: r0", *map(line, range(number)), f"r{number}: {last}")


def references(number: int, schema: Callable[[Any], Any], ref: str = "#/$defs/{}") -> Constraint:
    """Schemas that each refer to the next one."""
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


REFUSED: dict[str, tuple[Constraint, str]] = {
    "intersections": (
        lark("start: T", "T: " + " & ".join(f"/{each}/" for each in SLOW)),
        "21 operators &",
    ),
    "intersections of several terminals": (
        lark("start: A0", *(f"A{n}: /{SLOW[n]}/ & A{n + 1}" for n in range(9)), "A9: /a*/"),
        "9 operators &",
    ),
    "complements": (
        lark("start: T", "T: /[ab]{30}/" + "".join(f" & ~/{each}/" for each in SLOW[:10])),
        "10 operators &",
    ),
    "hard to tell from nothing": (
        lark("start: T", "T: /[ab]{30}/" + "".join(f" & ~/{each}/" for each in SLOW[5:9])),
        "fuel",
    ),
    "a long text in few characters": (regex("(a{999}){999}"), "998001 characters that"),
    "a long text by doubling": (
        lark("start: T0", *(f"T{n}: T{n + 1} T{n + 1}" for n in range(30)), 'T30: "a"'),
        "characters that must follow",
    ),
    "a long text in llama.cpp's syntax": (
        lark("root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(30)), 'r30 ::= "a"'),
        "characters that must follow",
    ),
    "optional parts": (regex("a?b?" * 2_000), "4000 optional parts"),
    "optional terminals": (
        lark("start: T", "T: " + "A?B?" * 2_000, "A: /a/", "B: /b/"),
        "4000 optional parts",
    ),
    "optional parts in a schema": (
        json_constraint({"type": "string", "pattern": "a?b*" * 2_000}),
        "4000 optional parts",
    ),
    "classes of Unicode": (regex(r"\P{L}" * 9_000), "9000 classes of Unicode"),
    "a chain of rules": (chain(4_000, lambda n: f"r{n}: r{n + 1}", '"a"'), "4002 levels deep"),
    "a cycle of rules": (
        chain(3_000, lambda n: f'r{n}: r{n + 1} | "a"', "r0"),
        "levels deep",
    ),
    "a chain of rules over lines": (
        chain(4_000, lambda n: f"r{n}[lazy // ]\n]: (\nr{n + 1}\n)", "/a/"),
        "levels deep",
    ),
    "a chain of grammars": (
        chain(2_000, lambda n: f'r{n}: %lark {{\nstart: "b"\n}} r{n + 1}', '"a"'),
        "levels deep",
    ),
    "a chain of terminals": (
        lark(
            "start: T0", *(f'T{n}: (/[xy]*/ | T{n + 1} "z")*' for n in range(2_000)), "T2000: /a/"
        ),
        "levels deep",
    ),
    "many optional symbols": (lark("start: " + '"a"? ' * 9_000), "rules branch 18001 times"),
    "many rules of many alternatives": (
        lark(
            "start: e0",
            *(f"e{n}: " + " | ".join(f"e{m}" for m in range(60)) + ' | "a"' for n in range(60)),
        ),
        "rules branch 3661 times",
    ),
    "rules in llama.cpp's syntax": (
        lark("root ::= r0", *(f'r{n} ::= "a" r{n + 1}' for n in range(999)), 'r999 ::= "a"'),
        "1001 rules",
    ),
    "no root": (lark("a ::= [a]"), "No 'root' rule found"),
    "half an escape": (lark('root ::= "\\'), "string index out of range"),
    "a chain of references": (references(2_000, lambda ref: {"items": ref}), "levels deep"),
    "a chain of escaped references": (
        references(2_000, lambda ref: {"items": ref}, "#/%24defs/{}"),
        "levels deep",
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
        "levels deep",
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
        "levels deep",
    ),
    "patterns of all properties": (
        all_of(
            lambda n: (
                {"additionalProperties": pattern(n)} if n % 2 else {"properties": {"x": pattern(n)}}
            )
        ),
        "14 patterns for one text",
    ),
    "patterns of all items": (
        all_of(lambda n: {"items": pattern(n)} if n % 2 else {"prefixItems": [pattern(n)]}),
        "14 patterns for one text",
    ),
    "patterns behind references into allOf": (
        all_of(
            lambda n: {"$ref": f"#/$defs/{n}/allOf/0"},
            **{"$defs": {str(n): {"allOf": [pattern(n)]} for n in range(14)}},
        ),
        "14 patterns for one text",
    ),
    "patterns behind references by name": (
        all_of(
            lambda n: {"$ref": f"#a{n}"},
            **{"$defs": {str(n): {"$anchor": f"a{n}", **pattern(n)} for n in range(14)}},
        ),
        "patterns for one text",
    ),
    "patterns of names": (
        json_constraint(
            {
                "patternProperties": {f"^x{n}y*$": {"type": "integer"} for n in range(300)},
                "additionalProperties": {"type": "string"},
            }
        ),
        "44850 pairs of patternProperties",
    ),
    "formats": (
        json_constraint(
            {"anyOf": [{"format": "uri", "maxLength": number} for number in range(500)]}
        ),
        "500 format",
    ),
    "bounds": (
        json_constraint(
            {"properties": {f"{n}": {"minimum": -n / 8, "maximum": n / 16} for n in range(400)}}
        ),
        "400 m[ai][nx]imum",
    ),
    "objects as values": (
        json_constraint({"enum": [{"a": [n]} for n in range(2_000)]}),
        "lists in",
    ),
    "schemas of one grammar together": (
        lark(
            "start: "
            + " | ".join(
                f'%json {{"type": "integer", "multipleOf": {9_973 + n}}}' for n in range(9)
            )
        ),
        "multipleOf=",
    ),
    "objects merged again and again": (
        merged(lambda refs, plain: {"allOf": [{"properties": refs}, {"properties": plain}]}),
        "merged more than 5000 times",
    ),
    "objects merged with what is beside": (
        merged(lambda refs, plain: {"properties": refs, "allOf": [{"properties": plain}]}),
        "merged more than 5000 times",
    ),
    "references merged with what is beside": (
        merged(
            lambda refs, _: {
                "properties": {n: {**ref, "minProperties": 1} for n, ref in refs.items()}
            }
        ),
        "merged more than 5000 times",
    ),
    "a cycle of merged objects": (
        merged(
            lambda refs, plain: {"allOf": [{"properties": refs}, {"properties": plain}]},
            last={"properties": {"a": {"$ref": "#/$defs/0"}}},
        ),
        "merged more than 5000 times",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_hostile_constraint_is_refused_by_a_count(grammars: Grammars, family: str) -> None:
    constraint, words = REFUSED[family]
    with pytest.raises(InvalidRequest, match=words):
        grammars.compile(constraint)


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
def test_what_is_large_by_its_text_is_compiled(grammars: Grammars, name: str) -> None:
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


def test_a_definition_that_is_not_understood_is_refused() -> None:
    check_lark('start: "a"\nb: "c"')
    with pytest.raises(ValueError, match="not read as a definition"):
        check_lark('start: "a" b: "c"')


def patterns(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(parts, min_size=1, max_size=4).map("".join)
    bounds = st.sampled_from(["?", "*", "+", "{3}", "{2,}", "{0,4}", "{2,5}"])
    return st.tuples(several, bounds).map(lambda pair: f"(?:{pair[0]}){pair[1]}")


LETTERS = st.sampled_from(["a", r"\.", "[^]a-c]", r"\x41", r"\d", ".", "(b)", "[[:alpha:]x]?"])


@given(st.recursive(LETTERS, patterns, max_leaves=12))
def test_the_length_is_that_of_the_shortest_match(text: str) -> None:
    python = text.replace("[[:alpha:]x]", "[a-z]")
    shortest = re._parser.parse(python).getwidth()[0]  # type: ignore[attr-defined]
    assert regex_size(text, Work()).length == shortest


GRAPHS = st.dictionaries(
    st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), min_size=1, max_size=6
)


@given(GRAPHS)
def test_a_chain_is_at_least_as_deep_as_any_path(graph: dict[str, set[str]]) -> None:
    names = sorted(graph)
    paths = (path for size in range(1, 7) for path in itertools.permutations(names, size))
    longest = max(
        len(path)
        for path in paths
        if all(after in graph[before] for before, after in itertools.pairwise(path))
    )
    for weight in (600 // longest, 600 // longest + 1):
        if weight * longest > 600:
            with pytest.raises(ValueError, match="levels deep"):
                check_chain(dict.fromkeys(names, weight), graph)
    order = check_chain(dict.fromkeys(names, 1), graph)
    assert sorted(order) == names


def test_errors_name_what_there_is_too_much_of() -> None:
    schema: Any = {"properties": {str(n): {} for n in range(9_000)}}
    with pytest.raises(ValueError, match=r"^9000 properties: compiling that takes too long$"):
        check_lark("start: %json " + json.dumps(schema))
