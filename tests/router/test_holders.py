"""Both indexes of block holders against a dict of sets, on keys that collide."""

import hashlib
import mmap
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire.router.prefix_index import native_index as native_holders
from quire.router.prefix_index.index import PrefixIndex
from quire.router.prefix_index.native_index import NativePrefixIndex
from quire.router.prefix_index.python_index import PythonPrefixIndex
from quire.worker.blocks.events import NUM_BUCKETS, bucket_of, keys_of

NUM_BLOCKS = 400
NUM_SLOTS = 70  # More than the bits of a word.
SLOTS = range(NUM_SLOTS)  # Group names equal slots.


def crowded(number: int) -> bytes:
    """Keys in one segment of the compiled table, a third of them with the same home slot."""
    data = bytearray(hashlib.sha256(number.to_bytes(4, "little")).digest())
    data[6] &= 0x3F
    data[7] = 9
    if number % 3 == 0:
        data[0:4] = bytes(4)
    return bytes(data)


BLOCKS = [crowded(number) for number in range(NUM_BLOCKS)]


def indexes(max_blocks: int) -> list[PrefixIndex]:
    library = native_holders.library()
    if library is None:
        pytest.skip("no C++ compiler")
    return [
        NativePrefixIndex(library, max_blocks=max_blocks),
        PythonPrefixIndex(max_blocks=max_blocks),
    ]


spans = st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS))
operations = st.tuples(
    st.sampled_from(["add", "add", "add", "remove", "clear", "replace"]),
    st.integers(0, NUM_SLOTS - 1),
    spans,
)


def test_their_memory_is_what_their_blocks_take() -> None:
    for index in indexes(max_blocks=200_000):
        index.admit(0)
        empty = index.num_bytes
        index.add(random.Random(1).randbytes(32 * 100_000), slot=0)
        # 16 to 24 bytes a key compiled, some 80 to 120 in Python's dict.
        assert 14 < (index.num_bytes - empty) / 100_000 < 130
        assert index.num_sets == 1


def test_a_compiled_set_of_few_takes_the_same_of_ten_thousand_groups_as_of_eight() -> None:
    taken = []
    for num_groups in (8, 10_000):
        index = indexes(max_blocks=200_000)[0]
        index.admit(num_groups - 1)
        empty = index.num_bytes
        for number in range(28 * 100):
            first = number % num_groups
            second = (first + 1 + number // num_groups % (num_groups - 1)) % num_groups
            data = random.Random(number).randbytes(31 * 32)
            index.add(data, slot=first)
            index.add(data, slot=second)
        assert index.num_sets == 28 if num_groups == 8 else index.num_sets > 2000
        taken.append((index.num_bytes - empty) / index.num_blocks)
    # As bits it would be 1,250 bytes, 40 for each of the 31 blocks that share one.
    assert taken[1] < taken[0] + 4


@pytest.mark.parametrize("first", [0, 60])
def test_sets_become_large_and_small_again(first: int) -> None:
    for index in indexes(max_blocks=NUM_BLOCKS):
        index.admit(first + 8)
        for num_holders in (*range(1, 9), *range(8, 0, -1)):
            held = set(range(first, first + num_holders))
            for slot in range(first, first + 8):
                change = index.add if slot in held else index.remove
                change(BLOCKS[0] + BLOCKS[1], slot=slot)
            assert index.longest_prefix(BLOCKS[0], SLOTS).keys() == held
            assert index.num_sets == 1
        for slot in range(first, first + 8):
            index.add(BLOCKS[0], slot=slot)
        for slot in range(first, first + 7):
            index.clear(slot=slot)
            left = set(range(slot + 1, first + 8))
            assert index.longest_prefix(BLOCKS[0], SLOTS).keys() == left
            # Later keys find holder sets that clearing has made equal.
            index.add(BLOCKS[2], slot=first + 7)
            index.remove(BLOCKS[2], slot=first + 7)


@given(st.lists(operations, max_size=30))
@settings(max_examples=examples(150))
def test_both_are_a_dict_of_sets(changes: list[tuple[str, int, tuple[int, int]]]) -> None:
    model: dict[int, set[bytes]] = {slot: set() for slot in range(NUM_SLOTS)}
    both = indexes(max_blocks=NUM_BLOCKS)
    for what, slot, (start, length) in changes:
        chosen = BLOCKS[start : start + length]
        data = b"".join(chosen)
        for index in both:
            index.admit(slot)
            if what == "add":
                index.add(data, slot=slot)
            elif what == "remove":
                index.remove(data, slot=slot)
            elif what == "clear":
                index.clear(slot=slot)
            else:
                index.replace(data, slot=slot, buckets=bytes([9]))
        if what == "add":
            model[slot] |= set(chosen)
        elif what == "remove":
            model[slot] -= set(chosen)
        else:
            model[slot] = set() if what == "clear" else set(chosen)
        for index in both:
            assert index.num_blocks == len(set().union(*model.values()))
            assert index.num_held(slot) == len(model[slot])
    for index in both:
        for block in BLOCKS:
            holders = {slot for slot in model if block in model[slot]}
            assert index.longest_prefix(block, SLOTS) == dict.fromkeys(holders, 1)
        for slot in range(index.num_slots):
            assert index.digests(slot) == (_digest(model[slot]), bytes(NUM_BUCKETS))


@given(st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, NUM_BLOCKS)))
@settings(max_examples=examples(150))
def test_every_end_of_a_chain_is_found(ends: dict[int, int]) -> None:
    prompt = b"".join(BLOCKS)
    for index in indexes(max_blocks=NUM_BLOCKS):
        index.admit(NUM_SLOTS - 1)
        for slot, end in ends.items():
            index.add(prompt[: 32 * end], slot=slot)
        for length in (1, 2, 9, 399, 400):
            expected = {slot: min(end, length) for slot, end in ends.items() if end}
            assert index.longest_prefix(prompt[: 32 * length], SLOTS) == expected
            lengths = index.prefix_lengths(prompt[: 32 * length])
            assert {slot: int(lengths[slot]) for slot in np.nonzero(lengths)[0]} == expected


def test_a_prompt_without_blocks_or_a_directory_without_groups_has_no_prefix() -> None:
    for index in indexes(max_blocks=10):
        assert index.longest_prefix(b"", SLOTS) == {}
        assert index.longest_prefix(BLOCKS[0], SLOTS) == {}
        assert index.prefix_lengths(BLOCKS[0]).tolist() == []


def test_what_is_refused_is_counted_and_its_bucket_noted() -> None:
    for index in indexes(max_blocks=3):
        index.admit(0)
        index.add(b"".join(BLOCKS[:5]), slot=0)
        assert (index.num_blocks, index.num_refused_blocks, index.num_held(0)) == (3, 2, 3)
        assert [n for n, was_refused in enumerate(index.digests(0)[1]) if was_refused] == [9]
        index.clear(slot=0)
        assert not any(index.digests(0)[1])


def test_blocks_whose_holders_are_gone_leave_while_others_come() -> None:
    names = [hashlib.sha256(b"%d" % number).digest() for number in range(20_000)]
    for index in indexes(max_blocks=10_000):
        index.admit(1)
        for start in range(0, 20_000, 500):
            # Every few hundred blocks the other group dies, and there is room all the time.
            slot = start // 500 % 2
            index.clear(slot=slot)
            index.add(b"".join(names[start : start + 500]), slot=slot)
            assert index.num_held(slot) == 500
        assert index.num_refused_blocks == 0
        assert index.num_blocks == 1000


def names_of_one_segment(seed: int, count: int) -> bytes:
    """Keys of one segment, which grows as large as in a table of a thousand times as many keys."""
    data = np.frombuffer(random.Random(seed).randbytes(32 * count), np.uint8).reshape(-1, 32)
    crowd = data.copy()
    crowd[:, 6] &= 0x3F
    crowd[:, 7] = 9
    return crowd.tobytes()


def test_a_slot_that_was_not_admitted_is_refused() -> None:
    index = indexes(max_blocks=10)[0]
    index.admit(3)
    for slot in (-1, 4, 1 << 32):
        for use in (
            lambda slot: index.add(BLOCKS[0], slot=slot),
            lambda slot: index.remove(BLOCKS[0], slot=slot),
            lambda slot: index.replace(BLOCKS[0], slot=slot, buckets=b"\0"),
            lambda slot: index.clear(slot=slot),
            lambda slot: index.num_held(slot),
            lambda slot: index.digests(slot),
        ):
            with pytest.raises(IndexError, match=f"slot {slot}: must be one of 4"):
                use(slot)
    for slot in (-1, 1 << 24, 1 << 32):
        with pytest.raises(IndexError, match=f"slot {slot}: must be below"):
            index.admit(slot)
    assert index.num_slots == 4


def test_large_segments_keep_what_is_theirs_while_others_come_and_go() -> None:
    library = native_holders.library()
    if library is None:
        pytest.skip("no C++ compiler")
    alive: dict[int, tuple[NativePrefixIndex, bytes]] = {}
    for seed in range(12):
        index = NativePrefixIndex(library, max_blocks=100_000)
        index.admit(1)
        data = names_of_one_segment(seed, 3000 * (1 + seed % 4))
        for start in range(0, len(data), 32 * 500):
            index.add(data[start : start + 32 * 500], slot=start // (32 * 500) % 2)
        index.clear(slot=1)
        index.remove(data[: 32 * 100], slot=0)  # Both sweep: keys without holders free their slots.
        index.add(data[: 32 * 100], slot=0)
        alive[seed] = index, data
        alive.pop(seed - 1 - seed % 3, None)
    assert len(alive) > 2
    for index, data in alive.values():
        for number in range(len(data) // 32):
            expected = {0: 1} if number // 500 % 2 == 0 else {}
            assert index.longest_prefix(data[32 * number : 32 * number + 32], SLOTS) == expected


def test_an_index_that_is_gone_gives_its_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    library = native_holders.library()
    if library is None:
        pytest.skip("no C++ compiler")
    data = names_of_one_segment(0, 600_000)
    index = NativePrefixIndex(library, max_blocks=600_000)
    index.admit(0)
    index.add(data, slot=0)
    taken, before = index.num_bytes, resident()
    del index
    assert taken > 9_000_000
    assert before - resident() > 0.7 * taken


def test_a_large_index_gives_most_of_its_memory_back_and_takes_it_again() -> None:
    library = native_holders.library()
    if library is None:
        pytest.skip("no C++ compiler")
    index = NativePrefixIndex(library, max_blocks=1_000_000)
    index.admit(1)
    draw = random.Random(3)
    leaving, staying = draw.randbytes(32 * 600_000), draw.randbytes(32 * 60_000)
    index.add(leaving, slot=0)
    for start in range(0, len(staying), 32 * 500):
        index.add(staying[start : start + 32 * 500], slot=1)
    taken = index.num_bytes
    index.clear(slot=0)
    for _ in range(1024):
        index.add(b"", slot=1)  # Each sweeps a segment.
    assert index.num_blocks == index.num_held(1) == 60_000
    assert index.num_bytes < 0.2 * taken
    index.add(leaving, slot=0)
    assert index.num_blocks == 660_000
    for data, slot in ((leaving, 0), (staying, 1)):
        for start in range(0, len(data), 32 * 97):
            assert index.longest_prefix(data[start : start + 32], SLOTS) == {slot: 1}
    index.remove(leaving, slot=0)
    index.remove(staying, slot=1)
    assert index.num_blocks == 0
    assert index.digests(0) == index.digests(1) == (bytes(8 * NUM_BUCKETS), bytes(NUM_BUCKETS))


@given(st.lists(st.lists(st.booleans(), min_size=60, max_size=60), min_size=1, max_size=6))
@settings(max_examples=examples(150))
def test_of_a_chain_with_holes_one_of_the_ends_is_named(held: list[list[bool]]) -> None:
    for index in indexes(max_blocks=NUM_BLOCKS):
        index.admit(len(held) - 1)
        for slot, holds in enumerate(held):
            for block, is_held in zip(BLOCKS, holds, strict=False):
                if is_held:
                    index.add(block, slot=slot)
        lengths = index.longest_prefix(b"".join(BLOCKS[:60]), SLOTS)
        assert set(lengths) == {slot for slot, holds in enumerate(held) if holds[0]}
        for slot, length in lengths.items():
            assert held[slot][length - 1]
            assert length == 60 or not held[slot][length]


def _digest(blocks: set[bytes]) -> bytes:
    xor: Counter[int] = Counter()
    for (key,) in (keys_of(block) for block in blocks):
        xor[bucket_of(key)] ^= key
    return b"".join(xor[bucket].to_bytes(8, "little") for bucket in range(NUM_BUCKETS))


@pytest.mark.parametrize("size", ["HASH_BYTES", "NUM_BUCKETS"])
def test_a_library_with_buffers_of_other_sizes_is_refused(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_holders.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(native_holders, size, 48)
    with pytest.raises(RuntimeError, match=r"is (32|256) in the native directory, 48 here"):
        native_holders._load()
