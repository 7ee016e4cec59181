"""Files with duplicate keys are refused; all others are read as by their plain parsers."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.unique_keys import read_json, read_yaml

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_has_no_key_twice_is_read_as_ever(value: Any) -> None:
    for text in (yaml.safe_dump(value), yaml.safe_dump(value, default_flow_style=True)):
        assert read_yaml(text) == yaml.safe_load(text) == value
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "'a' stands twice, in lines 1 and 3"),
        ("a:\n- b: 1\n  c: 2\n  b: 1", "'b' stands twice, in lines 2 and 4"),
        ("x: &x {a: 1, a: 2}\ny: *x", "'a' stands twice, in lines 1 and 1"),
        ("[{'a': 1,\n\"a\": 1}]", "'a' stands twice, in lines 1 and 2"),
    ],
)
def test_a_key_that_stands_twice_is_named_with_both_lines(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_yaml(text)


def test_a_merged_key_may_be_overridden() -> None:
    text = "base: &b {a: 1, c: 2}\nown: {<<: *b, a: 3}"
    assert (
        read_yaml(text)
        == yaml.safe_load(text)
        == {
            "base": {"a": 1, "c": 2},
            "own": {"a": 3, "c": 2},
        }
    )


def test_json_is_refused_likewise() -> None:
    with pytest.raises(ValueError, match="'a' stands twice in an object"):
        read_json('[{"a": 1, "b": {}, "a": 1}]')
