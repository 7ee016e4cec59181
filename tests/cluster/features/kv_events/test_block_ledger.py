"""The block ledger, fed by a group's events with contents, against a plain twin of the log."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as common
from tests.examples import examples

from quire.cluster.features.kv_events.contents import PIECE_BLOCKS, with_contents
from quire.cluster.features.kv_events.format import events_of
from quire.cluster.features.kv_events.ledger import (
    Block,
    Change,
    Gap,
    Gone,
    Keys,
    Ledger,
    Told,
    key_of,
)
from quire.cluster.wire import contents_from_proto, contents_to_proto, events_from_proto
from quire.router.prefix_index.directory import Position
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.events import BlockContent, EventBatch, EventLog
from quire.worker.blocks.hashing import BlockHash

NUM_TIERS = 3
NUM_BLOCKS = 12


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number + 1]) * 32)


def content(number: int, parent: int | None = None, adapter: str = "") -> BlockContent:
    return BlockContent(
        None if parent is None else name(parent), bytes([number, 0, 0, 0] * 4), adapter, "salt"
    )


CONTENTS = {
    name(number): content(number, number - 1 if number % 4 else None)
    for number in range(NUM_BLOCKS)
}
"""Three chains of four blocks each."""


async def sent(batch: EventBatch, log: EventLog) -> list[pb.EventBatch]:
    assert log.contents is not None
    return [message async for message in with_contents(batch, log.contents)]


class Twin:
    """Blocks as published by the ledger: tiers and contents by key."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, BlockContent]] = {}

    def hear(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, Gone):
                for key in change.keys:
                    tier, _ = self.blocks.pop(key)
                    assert tier == change.tier
            else:
                for key, held in change.blocks:
                    assert key not in self.blocks
                    assert held.parent is None or key_of(held.parent) in self.blocks
                    self.blocks[key] = change.tier, held


def take(ledger: Ledger, twin: Twin, message: pb.EventBatch) -> None:
    contents = contents_from_proto(message.contents, block_size=4)
    num_more = message.contents.num_more
    for changes in ledger.apply(events_from_proto(message), contents, num_more=num_more):
        twin.hear(changes)


CHANGES = st.lists(
    st.tuples(st.booleans(), st.integers(0, NUM_TIERS - 1), st.integers(0, 2), st.integers(1, 4)),
    min_size=1,
    max_size=6,
)
"""Stored or removed, the tier, the chain, and the number of its blocks present or left."""


def change(log: EventLog, is_stored: bool, tier: int, chain: int, length: int) -> None:
    first = 4 * chain
    if is_stored:
        names = [name(first + index) for index in range(length)]
        log.describe({each: CONTENTS[each] for each in names})
        log.stored(names, tier=tier)
    else:
        log.removed([name(first + index) for index in reversed(range(length - 1, 4))], tier=tier)


def present(log: EventLog) -> dict[int, tuple[int, BlockContent]]:
    """Blocks in a log. Chains have no holes, since each tier holds the beginnings of its chains."""
    snapshot = log.snapshot()
    tiers = {
        each: tier
        for tier, names in enumerate((snapshot.snapshot or (), *snapshot.slower))
        for each in names
    }
    found: dict[int, tuple[int, BlockContent]] = {}
    for number in range(NUM_BLOCKS):
        each = name(number)
        if each in tiers:
            found[key_of(each)] = tiers[each], CONTENTS[each]
    return found


@pytest.mark.anyio
@settings(max_examples=examples(150), deadline=None)
@given(rounds=st.lists(st.tuples(CHANGES, st.sampled_from(["all", "all", "lost", "snapshot"]))))
async def test_what_is_told_is_what_the_log_has_also_where_messages_are_lost(
    rounds: list[tuple[list[tuple[bool, int, int, int]], str]],
) -> None:
    log = EventLog(epoch=1, num_tiers=NUM_TIERS, keeps_contents=True)
    ledger, twin = Ledger(Keys()), Twin()
    for changes, fate in rounds:
        for each in changes:
            change(log, *each)
        position = ledger.position
        if fate == "lost":
            continue
        is_known = fate == "all" and position.epoch == 1
        batch = log.since(position.next_seq) if is_known else log.snapshot()
        for message in await sent(batch, log):
            take(ledger, twin, message)
        assert log.contents is not None
        assert log.contents.keys() == {each for each in CONTENTS if key_of(each) in present(log)}
        assert twin.blocks == present(log)
    for last in ledger.clear():
        twin.hear(last)
    assert not twin.blocks


@pytest.mark.anyio
async def test_a_block_with_anothers_key_is_left_out_and_all_behind_it() -> None:
    log = EventLog(epoch=1, keeps_contents=True)
    other = BlockHash(name(1)[:8] + bytes(24))
    child = BlockHash(b"c" * 32)
    blocks = {name(1): content(1), other: content(2), child: content(3)._replace(parent=other)}
    log.describe(blocks)
    log.stored(blocks)
    ledger, twin = Ledger(keys := Keys()), Twin()
    begin = replace(log.since(0), epoch=0)
    for message in await sent(begin, log):
        take(ledger, twin, message)
    assert twin.blocks == {key_of(name(1)): (0, content(1))}
    again, second = Ledger(keys), Twin()
    for message in await sent(begin, log):
        take(again, second, message)
    assert second.blocks == twin.blocks, "another group may have the same block"
    for each in (ledger, again):
        assert list(each.clear())
    assert keys.take(other) == key_of(other), "nobody has the key any more"


@pytest.mark.anyio
async def test_many_blocks_come_in_several_messages_and_are_asked_for_again_if_one_is_lost() -> (
    None
):
    log = EventLog(epoch=1, keeps_contents=True)
    names = [BlockHash(index.to_bytes(32, "little")) for index in range(1, 2 * PIECE_BLOCKS + 2)]
    parents = [None, *names[:-1]]
    log.describe(
        {
            each: BlockContent(parent, bytes(16), "", "")
            for each, parent in zip(names, parents, strict=True)
        }
    )
    log.stored(names)
    messages = await sent(log.snapshot(), log)
    assert [message.contents.num_more for message in messages] == [2, 1, 0]
    assert {message.contents.num_blocks for message in messages} == {len(names)}
    ledger, twin = Ledger(Keys()), Twin()
    for message in messages[:2]:
        take(ledger, twin, message)
    assert ledger.position == Position()
    for message in await sent(log.snapshot(), log):
        take(ledger, twin, message)
    assert twin.blocks.keys() == set(map(key_of, names))
    assert ledger.position == Position(1, 1)


@pytest.mark.anyio
async def test_blocks_that_nobody_described_are_told_once_somebody_has() -> None:
    log = EventLog(epoch=1, num_tiers=3, keeps_contents=True)
    log.stored([name(0), name(1)], tier=2)
    ledger, twin = Ledger(Keys()), Twin()
    for message in await sent(log.snapshot(), log):
        take(ledger, twin, message)
    assert not twin.blocks
    log.describe({each: CONTENTS[each] for each in (name(0), name(1), name(2))})
    log.stored([name(0), name(1), name(2)])
    for message in await sent(log.since(ledger.position.next_seq), log):
        take(ledger, twin, message)
    assert {key: tier for key, (tier, _) in twin.blocks.items()} == {
        key_of(name(number)): 0 for number in range(3)
    }


@pytest.mark.anyio
async def test_events_that_do_not_follow_on_and_a_digest_that_differs_are_noticed() -> None:
    log = EventLog(epoch=1, keeps_contents=True)
    ledger, twin = Ledger(Keys()), Twin()
    for message in await sent(log.snapshot(), log):
        take(ledger, twin, message)
    for number in (0, 4, 8):
        change(log, True, 0, number // 4, 2)
    with pytest.raises(Gap, match="event 1 came, and not 0"):
        take(ledger, twin, (await sent(log.since(1), log))[0])
    assert not twin.blocks
    some = replace(log.since(0), events=log.since(0).events[:1], digest=log.since(3).digest)
    with pytest.raises(Gap, match="digest"):
        take(ledger, twin, (await sent(some, log))[0])
    assert ledger.position == Position(), "to begin from the start"


def test_contents_survive_the_wire_and_broken_ones_are_refused() -> None:
    blocks = [
        (each, held._replace(adapter="a" * (n % 2)))
        for n, (each, held) in enumerate(CONTENTS.items())
    ]
    message = contents_to_proto(blocks)
    assert contents_from_proto(message, block_size=4) == blocks
    assert len(message.namespaces) == 2
    for name_, value in (
        ("parents", b""),
        ("token_ids", message.token_ids[:-4]),
        ("namespace_of", message.namespace_of[:-4]),
        ("namespace_of", b"\2" + message.namespace_of[1:]),
        ("hashes", message.hashes[:-1]),
    ):
        broken = pb.Contents.FromString(message.SerializeToString())
        setattr(broken, name_, value)
        with pytest.raises(ValueError, match=r"contents of|namespace 2|block hashes of"):
            contents_from_proto(broken, block_size=4)


def test_blocks_of_one_chain_are_one_event_which_names_the_adapter_as_clients_do() -> None:
    blocks = [
        Block(key_of(name(number)), content(number, parent, "digest"))
        for number, parent in ((0, None), (1, 0), (3, 2), (5, 1))
    ]
    changes: list[Change] = [Gone(2, [7, -8]), Told(1, blocks)]
    removed, *stored = events_of(changes, adapter_names={"digest": "french"})
    assert list(removed.removed.block_hashes) == [7, -8]
    assert removed.removed.tier == common.KV_CACHE_TIER_DISK
    assert [[block.token_ids[0] for block in each.stored.blocks] for each in stored] == [
        [0, 1],
        [3],
        [5],
    ]
    assert {each.stored.lora_name for each in stored} == {"french"}
    assert not stored[0].stored.HasField("parent_block_hash")
    assert stored[2].stored.parent_block_hash == key_of(name(1))
    (unnamed,) = events_of([Told(0, blocks[:1])], adapter_names={})
    assert unnamed.stored.lora_name == "digest"
