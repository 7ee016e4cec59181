"""The block directory's view of the groups' blocks, with each implementation of its index."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from quire.router.prefix_index import native_index as native_holders
from quire.router.prefix_index.directory import (
    Applied,
    BlockDirectory,
    GroupId,
    NeedsResync,
    Position,
)
from quire.router.prefix_index.native_index import NativePrefixIndex
from quire.router.prefix_index.python_index import PythonPrefixIndex
from quire.worker.blocks.events import BlocksRemoved, BlocksStored, EventBatch, EventLog
from quire.worker.blocks.hashing import BlockHash, BlockHashes, hash_blocks, root_hash

GROUPS = tuple(GroupId(name) for name in ("a", "b", "c"))

New = Callable[..., BlockDirectory]


@pytest.fixture(params=["native", "python"])
def new(request: pytest.FixtureRequest) -> New:
    """Builds directories over the index ``param``."""
    library = native_holders.library()
    if request.param == "native" and library is None:
        pytest.skip("no C++ compiler")

    def make(max_blocks: int = 1000, **options: float) -> BlockDirectory:
        if request.param == "native" and library is not None:
            index = NativePrefixIndex(library, max_blocks=max_blocks)
            return BlockDirectory(max_blocks=max_blocks, index=index, **options)
        slow = PythonPrefixIndex(max_blocks=max_blocks)
        return BlockDirectory(max_blocks=max_blocks, index=slow, **options)

    return make


def name_of(number: int) -> BlockHash:
    """Name of a block, in one of three buckets."""
    digest = bytearray(hashlib.sha256(bytes([number])).digest())
    digest[7] = number % 3
    return BlockHash(bytes(digest))


UNIVERSE = tuple(name_of(number) for number in range(12))


def stored(*hashes: BlockHash, epoch: int = 1, first_seq: int = 0) -> EventBatch:
    return EventBatch(epoch=epoch, first_seq=first_seq, events=(BlocksStored(hashes),))


def held(directory: BlockDirectory, group: GroupId) -> set[BlockHash]:
    return {h for h in UNIVERSE if group in directory.longest_prefix([h])}


def test_the_directory_says_how_it_fares(new: New) -> None:
    directory = new(max_blocks=500, stale_after_s=10)
    empty = directory.stats()
    assert (empty.max_blocks, empty.num_sets, empty.num_stale_groups) == (500, 0, 0)
    directory.apply(GROUPS[0], stored(*UNIVERSE[:6]), now_s=0)
    directory.apply(GROUPS[1], stored(*UNIVERSE[:3]), now_s=5)
    # Both groups hold three blocks, the first alone three more.
    assert directory.stats().num_sets == 2
    snapshot = EventBatch(epoch=1, first_seq=7, events=(), snapshot=BlockHashes.of(UNIVERSE[:2]))
    assert isinstance(
        directory.apply(GROUPS[1], stored(UNIVERSE[3], first_seq=5), now_s=6), NeedsResync
    )
    directory.apply(GROUPS[1], snapshot, now_s=6)
    stats = directory.stats()
    assert (stats.num_gaps, stats.num_resyncs) == (1, 1)
    assert directory.expire(now_s=12) == [GROUPS[0]]
    assert directory.stats().num_stale_groups == 1
    directory.apply(GROUPS[0], EventBatch(epoch=1, first_seq=0, events=()), now_s=13)
    directory.expire(now_s=13)
    assert directory.stats().num_stale_groups == 0


def test_a_dead_groups_blocks_make_room_for_others(new: New) -> None:
    directory = new(max_blocks=4)
    directory.apply(GROUPS[0], stored(*UNIVERSE[:4]), now_s=0)
    directory.apply(GROUPS[1], stored(*UNIVERSE[3:5]), now_s=0)
    assert held(directory, GROUPS[1]) == {UNIVERSE[3]}
    assert directory.stats().num_refused_blocks == 1
    directory.drop(GROUPS[0])
    directory.apply(GROUPS[1], stored(*UNIVERSE[5:8], first_seq=1), now_s=0)
    assert held(directory, GROUPS[1]) == {UNIVERSE[3], *UNIVERSE[5:8]}


def test_a_new_epoch_forgets_the_old_and_late_batches_of_that_change_nothing(new: New) -> None:
    directory = new()
    directory.apply(GROUPS[0], stored(*UNIVERSE[:3], epoch=9), now_s=0)
    directory.apply(GROUPS[1], stored(UNIVERSE[0]), now_s=0)
    directory.apply(GROUPS[0], stored(UNIVERSE[4], epoch=2), now_s=0)
    assert held(directory, GROUPS[0]) == {UNIVERSE[4]}
    late = stored(UNIVERSE[5], epoch=9, first_seq=1)
    assert directory.apply(GROUPS[0], late, now_s=0) == Applied(0)
    assert held(directory, GROUPS[0]) == {UNIVERSE[4]}
    assert directory.position(GROUPS[0]) == Position(2, 1)
    assert directory.stats().num_late_batches == 1
    assert held(directory, GROUPS[1]) == {UNIVERSE[0]}


def test_a_gap_names_the_event_to_go_on_from_and_changes_nothing(new: New) -> None:
    directory = new()
    directory.apply(GROUPS[0], stored(UNIVERSE[0], epoch=5), now_s=0)
    late = EventBatch(epoch=5, first_seq=3, events=(BlocksRemoved((UNIVERSE[0],)),))
    assert directory.apply(GROUPS[0], late, now_s=0) == NeedsResync(5, 1)
    assert held(directory, GROUPS[0]) == {UNIVERSE[0]}
    assert directory.stats().num_gaps == 1


def test_a_heartbeat_ahead_of_the_directory_shows_the_loss(new: New) -> None:
    directory = new()
    heartbeat = EventBatch(epoch=5, first_seq=2)
    assert directory.apply(GROUPS[0], heartbeat, now_s=0) == NeedsResync(5, 0)


def test_heartbeats_keep_a_group_but_gaps_do_not(new: New) -> None:
    directory = new(stale_after_s=10)
    for group in GROUPS[:2]:
        directory.apply(group, stored(UNIVERSE[0]), now_s=0)
    directory.apply(GROUPS[0], EventBatch(epoch=1, first_seq=1), now_s=9)
    directory.apply(GROUPS[1], EventBatch(epoch=1, first_seq=9), now_s=9)
    assert directory.expire(now_s=11) == [GROUPS[1]]
    assert directory.longest_prefix([UNIVERSE[0]]) == {GROUPS[0]: 1}


def test_prefixes_are_found_across_the_chunks_of_a_long_prompt(new: New) -> None:
    prompt = [BlockHash(hashlib.sha256(i.to_bytes(4, "big")).digest()) for i in range(1000)]
    directory = new()
    for group, length in zip(GROUPS, (1000, 256, 257), strict=True):
        directory.apply(group, stored(*prompt[:length]), now_s=0)
    assert directory.longest_prefix(prompt) == dict(zip(GROUPS, (1000, 256, 257), strict=True))


def test_who_comes_takes_the_slots_of_those_who_left(new: New) -> None:
    directory = new()
    a, b, c = GROUPS
    for group in (a, b, c):
        directory.apply(group, EventBatch(epoch=1, first_seq=0), now_s=0)
    assert [directory.slots(group) for group in (a, b, c)] == [(0,), (1,), (2,)]
    directory.drop(b)
    directory.drop(a)
    assert directory.slots(a) == ()
    for number, group in enumerate((b, a, GroupId("d"))):
        directory.apply(group, EventBatch(epoch=1, first_seq=0), now_s=0)
        assert directory.slots(group) == ((0,), (1,), (3,))[number]
    assert directory.slots(c) == (2,)


def test_memory_does_not_grow_with_the_number_of_holders(new: New) -> None:
    directory = new()
    prompt = [BlockHash(hashlib.sha256(i.to_bytes(4, "big")).digest()) for i in range(500)]
    for i in range(100):
        directory.apply(GroupId(f"group-{i}"), stored(*prompt), now_s=0)
    stats = directory.stats()
    assert (stats.num_blocks, stats.num_holdings) == (500, 50_000)
    assert set(directory.longest_prefix(prompt).values()) == {500}


def test_tenants_models_and_adapters_live_side_by_side(new: New) -> None:
    tokens = np.arange(64, dtype=np.uint32)
    common = {"model_fingerprint": "m", "kv_dtype": "f", "block_size": 16}
    others = [{}, {"cache_salt": "x"}, {"adapter": "x"}, {"model_fingerprint": "x"}]
    prompts = [
        hash_blocks(tokens, block_size=16, root=root_hash(**{**common, **other}))  # type: ignore[arg-type]
        for other in others
    ]
    directory = new()
    for prompt, group in zip(prompts, [*GROUPS, GroupId("d")], strict=True):
        directory.apply(group, stored(*prompt), now_s=0)
    assert [directory.longest_prefix(prompt) for prompt in prompts] == [
        {group: 4} for group in [*GROUPS, GroupId("d")]
    ]


def test_drift_is_found_by_the_digest_and_only_its_bucket_is_asked_for(new: New) -> None:
    directory, log = new(), EventLog(epoch=5)
    log.stored(UNIVERSE)
    directory.apply(GROUPS[0], log.since(0), now_s=0)
    directory._index.remove(UNIVERSE[4], slot=0)  # 4 % 3 == 1, its bucket.
    answer = directory.apply(GROUPS[0], log.since(1), now_s=0)
    assert answer == NeedsResync(5, 1, drifted=bytes([1]))
    assert directory.stats().num_drifted_buckets == 1
    (bucket,) = log.replay(1, buckets=answer.drifted)
    assert bucket.snapshot is not None
    assert set(bucket.snapshot) == {name_of(number) for number in range(1, 12, 3)}
    assert directory.apply(GROUPS[0], bucket, now_s=0) == Applied(0)
    assert held(directory, GROUPS[0]) == set(UNIVERSE)
    assert directory.position(GROUPS[0]) == Position(5, 1)


def test_what_was_refused_is_asked_for_again_when_there_is_room_and_not_before(new: New) -> None:
    directory, log = new(max_blocks=6), EventLog(epoch=5)
    directory.apply(GROUPS[1], stored(*UNIVERSE[6:10]), now_s=0)
    log.stored(UNIVERSE[:4])
    assert directory.apply(GROUPS[0], log.since(0), now_s=0) == Applied(1)
    assert held(directory, GROUPS[0]) == set(UNIVERSE[:2])
    directory.drop(GROUPS[1])
    assert isinstance(directory.apply(GROUPS[0], log.since(1), now_s=0), NeedsResync)
    for batch in log.replay(1, buckets=directory.position(GROUPS[0]).drifted):
        assert isinstance(directory.apply(GROUPS[0], batch, now_s=0), Applied)
    assert held(directory, GROUPS[0]) == set(UNIVERSE[:4])


def test_a_group_that_turns_out_to_have_more_tiers_is_told_again_from_the_beginning(
    new: New,
) -> None:
    directory, log = new(), EventLog(epoch=5, num_tiers=2)
    log.stored(UNIVERSE[:3])
    directory.apply(GROUPS[0], replace(log.since(0), digest=None), now_s=0)
    assert len(directory.slots(GROUPS[0])) == 1
    log.stored(UNIVERSE[:2], tier=1)
    log.removed(UNIVERSE[:3])
    late = replace(log.since(1), digest=None)
    assert directory.apply(GROUPS[0], late, now_s=0) == NeedsResync(5, 0)
    directory.apply(GROUPS[0], log.since(0), now_s=0)
    in_cache, in_any = directory.slots(GROUPS[0])
    lengths = directory.prefix_lengths(UNIVERSE[:3])
    assert (lengths[in_cache], lengths[in_any]) == (0, 2)
    assert held(directory, GROUPS[0]) == set()
    assert (directory.num_blocks(GROUPS[0]), directory.stats().num_holdings) == (2, 2)


def test_slots_of_slower_tiers_are_given_back(new: New) -> None:
    directory = new()
    tiered = EventLog(epoch=5, num_tiers=3)
    tiered.stored(UNIVERSE[:2], tier=2)
    directory.apply(GROUPS[0], tiered.since(0), now_s=0)
    assert directory.slots(GROUPS[0]) == (0, 1, 2)
    directory.apply(GROUPS[0], stored(UNIVERSE[0], epoch=6), now_s=0)
    assert directory.slots(GROUPS[0]) == (0,), "its next epoch has one tier"
    directory.apply(GROUPS[1], tiered.since(0), now_s=0)
    assert directory.slots(GROUPS[1]) == (1, 2, 3)
    directory.drop(GROUPS[1])
    directory.apply(GROUPS[2], stored(UNIVERSE[0]), now_s=0)
    lengths = directory.prefix_lengths(UNIVERSE[:2])
    assert lengths.tolist() == [1, 1, 0, 0]
