from dataclasses import replace

import pytest

from quire.worker.blocks.events import (
    MAX_TIERS,
    NUM_BUCKETS,
    BlockContent,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    Digest,
    EventBatch,
    EventLog,
)
from quire.worker.blocks.hashing import BlockHash, BlockHashes, root_hash

A, B, C = (BlockHash(letter * 32) for letter in (b"a", b"b", b"c"))


@pytest.fixture
def log() -> EventLog:
    log = EventLog(epoch=7, capacity=2)
    log.stored([A, B])
    log.removed([A])
    log.stored([C])
    return log


def digest_of(*names: BlockHash) -> Digest:
    """The digest of a log with these keys: the XOR of each bucket's."""
    words = [0] * NUM_BUCKETS
    for name in names:
        words[name[7]] ^= int.from_bytes(name[:8], "little")
    return Digest(b"".join(word.to_bytes(8, "little") for word in words))


def test_a_subscriber_that_missed_some_is_given_those_in_order(log: EventLog) -> None:
    events, digest = (BlocksRemoved((A,)), BlocksStored((C,))), digest_of(B, C)
    assert log.since(1) == EventBatch(epoch=7, first_seq=1, events=events, digest=digest)
    assert log.since(3) == EventBatch(epoch=7, first_seq=3, digest=digest)


@pytest.mark.parametrize("seq", [0, 4])
def test_a_subscriber_that_missed_too_much_or_comes_from_elsewhere_is_given_a_snapshot(
    log: EventLog, seq: int
) -> None:
    batch = log.since(seq)
    assert batch.snapshot is not None
    assert sorted(batch.snapshot) == [B, C]
    expected = EventBatch(epoch=7, first_seq=3, snapshot=batch.snapshot, digest=digest_of(B, C))
    assert batch == expected


def test_buckets_asked_for_come_behind_the_replay_and_not_behind_a_snapshot(log: EventLog) -> None:
    buckets = bytes([A[7], C[7]])
    replay, part = log.replay(2, buckets=buckets)
    assert replay == EventBatch(epoch=7, first_seq=2, events=(BlocksStored((C,)),))
    assert part == EventBatch(
        epoch=7,
        first_seq=3,
        snapshot=BlockHashes(C),
        buckets=buckets,
        digest=digest_of(B, C),
    )
    assert log.replay(0, buckets=buckets) == [log.snapshot()]


def test_behind_the_events_of_a_replay_comes_what_shows_that_they_came(log: EventLog) -> None:
    replay, last = log.replay(1, buckets=b"")
    assert replay == replace(log.since(1), digest=None)
    assert last == log.since(3)
    assert log.replay(3, buckets=b"") == [last], "there was nothing that could be lost"
    (part,) = log.replay(3, buckets=bytes([C[7]]))
    assert part.snapshot is not None


def test_what_changes_nothing_is_no_event_and_leaves_the_digest(log: EventLog) -> None:
    before = log.since(3)
    log.stored([B, C, B])
    log.removed([A, A])
    assert log.since(3) == before
    log.stored([A, B, A])
    assert log.since(3).events == (BlocksStored((A,)),)
    assert log.since(3).digest == digest_of(A, B, C)


def test_events_are_numbered_without_a_gap_and_empty_ones_are_none(log: EventLog) -> None:
    heard: list[tuple[int, BlockEvent]] = []
    stop = log.subscribe(lambda seq, event: heard.append((seq, event)))
    log.removed([])
    log.removed([B])
    stop()
    log.removed([C])
    assert heard == [(3, BlocksRemoved((B,)))]
    assert log.next_seq == 5


def test_events_tell_each_blocks_fastest_tier_and_only_when_it_changes() -> None:
    log = EventLog(epoch=7, num_tiers=3)
    heard: list[BlockEvent] = []
    log.subscribe(lambda seq, event: heard.append(event))

    def told() -> list[BlockEvent]:
        events = heard.copy()
        heard.clear()
        return events

    log.stored([A, B])
    log.stored([A], tier=1)
    log.stored([A, B], tier=2)
    assert told() == [BlocksStored((A, B), 0)], "no copy is faster than the cache"
    log.removed([A, B])
    assert told() == [BlocksStored((A,), 1), BlocksStored((B,), 2)]
    assert log.since(log.next_seq).digest == digest_of() + digest_of(A) + digest_of(A, B)
    snapshot = log.snapshot()
    assert (snapshot.snapshot, snapshot.slower) == (
        BlockHashes(),
        (BlockHashes(A), BlockHashes(B)),
    )
    assert log.snapshot(bytes([B[7]])).slower == (BlockHashes(), BlockHashes(B))
    log.removed([B], tier=1)
    log.removed([A], tier=2)
    assert told() == [], "it was never there, or is still in a faster tier"
    log.stored([A])
    log.removed([A, B], tier=1)
    log.removed([A, B], tier=2)
    assert told() == [BlocksStored((A,), 0), BlocksRemoved((B,))]
    assert log.since(log.next_seq).digest == 3 * digest_of(A)


def test_contents_are_kept_of_blocks_that_are_in_some_tier_and_of_no_others() -> None:
    log = EventLog(epoch=7, num_tiers=2, keeps_contents=True)
    content = {name: BlockContent(None, b"1234", "", "") for name in (A, B)}
    log.describe(content)
    log.stored([A, B])
    log.stored([A], tier=1)
    assert log.contents == content
    log.removed([A, B])
    assert log.contents == {A: content[A]}
    log.removed([A], tier=1)
    assert log.contents == {}
    assert EventLog(epoch=7).contents is None


def test_blocks_described_after_they_were_stored_are_told_again_where_they_are() -> None:
    log = EventLog(epoch=7, num_tiers=2, keeps_contents=True)
    log.stored([A])
    log.stored([A, B], tier=1)
    seq, digest = log.next_seq, log.since(log.next_seq).digest
    content = {name: BlockContent(None, b"1234", "", "") for name in (A, B, C)}
    log.describe(content)
    assert log.since(seq).events == (BlocksStored((A,)), BlocksStored((B,), 1))
    assert log.since(seq).digest == digest
    log.describe(content)
    assert log.next_seq == seq + 2, "nothing new"


@pytest.mark.parametrize("num_tiers", [0, MAX_TIERS + 1])
def test_a_log_of_no_or_too_many_tiers_is_refused(num_tiers: int) -> None:
    with pytest.raises(ValueError, match=f"num_tiers={num_tiers}"):
        EventLog(epoch=1, num_tiers=num_tiers)


def test_model_numerics_type_block_size_adapter_and_salt_each_make_a_chain_of_its_own() -> None:
    def root(**changes: object) -> BlockHash:
        fields: dict[str, object] = {"model_fingerprint": "m", "kv_dtype": "f", "block_size": 16}
        return root_hash(**{**fields, **changes})  # type: ignore[arg-type]

    changes: list[dict[str, object]] = [
        {},
        {"model_fingerprint": "x"},
        {"numerics": "x"},
        {"kv_dtype": "x"},
        {"block_size": 32},
        {"adapter": "x"},
        {"cache_salt": "x"},
    ]
    assert len({root(**change) for change in changes}) == len(changes)
