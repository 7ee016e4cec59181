import re

import pytest

from quire.worker.weights.patterns import Pattern, of_wildcards

NAMES = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.12.mlp.up_proj", "a+b", ""]


@pytest.mark.parametrize(
    "text",
    [
        *("lm_head", ".*layers.1.mlp.up_proj", r"model\.layers\.\d+\.", "^model", "up_proj$"),
        *("(a|lm)_head", "model.layers.[1-3].mlp", ".*(up|down)_proj", "[^.]*$", "a?"),
    ],
)
def test_what_both_syntaxes_have_matches_as_in_pythons_re(text: str) -> None:
    for name in NAMES:
        assert Pattern(text).matches(name) == (re.match(text, name) is not None)


def test_a_pattern_that_backtracks_without_end_is_matched_in_linear_time() -> None:
    """Python's `re` would take 2^200 steps."""
    assert not Pattern("(.|.)" * 190 + "!").matches("a" * 400)
    assert not Pattern("(a*)*b").matches("a" * 400)


@pytest.mark.parametrize("text", ["(", "(?=a)", "(?<!a)b", r"(a)\1", "a" * 1001, "(a{999}){999}"])
def test_what_cannot_be_matched_in_linear_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"missing|invalid|at most 1000"):
        Pattern(text)


def test_wildcards_stand_for_any_text_and_nothing_else_does() -> None:
    for wildcards, fitting in {
        "*1.mlp.up_proj": ["model.layers.1.mlp.up_proj"],
        "model.*": ["model.layers.1.mlp.up_proj", "model.layers.12.mlp.up_proj"],
        "lm_head*": ["lm_head"],
        "a+*": ["a+b"],
        "*": NAMES,
        "l.*": [],
    }.items():
        assert [each for each in NAMES if Pattern(of_wildcards(wildcards)).matches(each)] == fitting
