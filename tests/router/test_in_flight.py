"""Counts of blocks in flight, in C++ and in Python, against a dict of counters."""

import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire.router.in_flight import NativeCounts, PrefixCounts, PythonCounts
from quire.router.prefix_index import native_index as native_holders

BLOCKS = [hashlib.sha256(bytes([number])).digest() for number in range(40)]
GROUPS = (0, 1, 7)

requests = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.integers(0, 39), st.integers(0, 40)), max_size=12
)


def both() -> list[PrefixCounts]:
    library = native_holders.library()
    if library is None:
        pytest.skip("no C++ compiler")
    return [NativeCounts(library), PythonCounts()]


@given(requests, st.data())
@settings(max_examples=examples(100))
def test_a_prefix_goes_on_as_long_as_some_request_in_flight_has_its_blocks(
    routed: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    implementations = both()
    model: dict[int, Counter[bytes]] = {group: Counter() for group in GROUPS}
    ended = data.draw(st.lists(st.sampled_from(routed), unique=True)) if routed else []
    for group, start, end in routed:
        model[group].update(BLOCKS[start:end])
        for counts in implementations:
            counts.add(b"".join(BLOCKS[start:end]), group=group)
    for group, start, end in ended:
        model[group].subtract(BLOCKS[start:end])
        for counts in implementations:
            counts.remove(b"".join(BLOCKS[start:end]), group=group)
    for length in (0, 3, 40):
        expected = [
            next((i for i in range(length, 40) if model[group][BLOCKS[i]] < 1), 40)
            for group in GROUPS
        ]
        for counts in implementations:
            assert counts.extend(b"".join(BLOCKS), GROUPS, [length] * 3).tolist() == expected


def test_groups_and_lengths_are_as_many() -> None:
    counts = both()[0]
    with pytest.raises(ValueError, match="1 groups, 2 lengths"):
        counts.extend(BLOCKS[0], [0], [0, 0])
