import pytest

from quire.worker.events import BlockEvent, BlocksRemoved, BlocksStored, EventBatch, EventLog
from quire.worker.hashing import BlockHash, root_hash

A, B, C = (BlockHash(letter) for letter in (b"a", b"b", b"c"))


@pytest.fixture
def log() -> EventLog:
    log = EventLog(epoch=7, capacity=2)
    log.stored([A, B])
    log.removed([A])
    log.stored([C])
    return log


def test_a_subscriber_that_missed_some_is_given_those_in_order(log: EventLog) -> None:
    events = (BlocksRemoved((A,)), BlocksStored((C,)))
    assert log.since(1) == EventBatch(epoch=7, first_seq=1, events=events)
    assert log.since(3) == EventBatch(epoch=7, first_seq=3)


@pytest.mark.parametrize("seq", [0, 4])
def test_a_subscriber_that_missed_too_much_or_comes_from_elsewhere_is_given_a_snapshot(
    log: EventLog, seq: int
) -> None:
    assert log.since(seq) == EventBatch(epoch=7, first_seq=3, snapshot=frozenset({B, C}))


def test_events_are_numbered_without_a_gap_and_empty_ones_are_none(log: EventLog) -> None:
    heard: list[tuple[int, BlockEvent]] = []
    stop = log.subscribe(lambda seq, event: heard.append((seq, event)))
    log.removed([])
    log.removed([B])
    stop()
    log.removed([C])
    assert heard == [(3, BlocksRemoved((B,)))]
    assert log.next_seq == 5


def test_model_type_block_size_adapter_and_salt_each_make_a_chain_of_its_own() -> None:
    def root(**changes: object) -> BlockHash:
        fields: dict[str, object] = {"model_fingerprint": "m", "kv_dtype": "f", "block_size": 16}
        return root_hash(**{**fields, **changes})  # type: ignore[arg-type]

    changes: list[dict[str, object]] = [
        {},
        {"model_fingerprint": "x"},
        {"kv_dtype": "x"},
        {"block_size": 32},
        {"adapter": "x"},
        {"cache_salt": "x"},
    ]
    assert len({root(**change) for change in changes}) == len(changes)
