import hashlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.router.directory import Applied, BlockDirectory, GroupId
from quire.router.sharding import Shard, ShardedDirectory, ShardMap, shard_of
from quire.router.simulate.shards import ShardedLog, Sharding
from quire.router.simulate.trace import Row, Trace
from quire.worker.events import EventBatch, EventLog
from quire.worker.hashing import BlockHash, BlockHashes

FIRST_BLOCKS = [BlockHash(hashlib.sha256(b"%d" % number).digest()) for number in range(4000)]


def test_shards_get_equal_shares() -> None:
    counts = Counter(shard_of(block, num_shards=8) for block in FIRST_BLOCKS)
    assert counts.keys() == set(range(8))
    assert max(counts.values()) < 1.25 * 500


def test_one_shard_more_moves_only_what_it_gets() -> None:
    for num_shards in range(1, 12):
        moved = 0
        for block in FIRST_BLOCKS:
            before = shard_of(block, num_shards=num_shards)
            after = shard_of(block, num_shards=num_shards + 1)
            assert after in (before, num_shards)
            moved += after != before
        assert moved == pytest.approx(4000 / (num_shards + 1), rel=0.25)


def test_no_shard_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards=0: must be at least 1"):
        shard_of(FIRST_BLOCKS[0], num_shards=0)


def test_a_chain_goes_by_its_first_block_that_is_not_spread() -> None:
    blocks = FIRST_BLOCKS[:40]
    for num_spread in range(6):
        shards = ShardMap(num_shards=8, spread=frozenset(blocks[:num_spread]))
        for length in range(len(blocks)):
            chain = blocks[:length]
            assert shards.num_spread(chain) == min(num_spread, length)
            expected = shard_of(blocks[num_spread], num_shards=8) if length > num_spread else None
            assert shards.shard_of(chain) == expected
            assert shards.shard_of(BlockHashes.of(chain)) == expected


def test_what_every_shard_keeps_is_asked_of_each_in_turn() -> None:
    chain = FIRST_BLOCKS[:3]
    directory = ShardedDirectory(ShardMap(num_shards=2, spread=frozenset(chain)))
    directory.apply(A, EventLog(epoch=1).snapshot(), shard=Shard(0), now_s=0)
    log = EventLog(epoch=1)
    log.stored(chain)
    directory.apply(A, log.snapshot(), shard=Shard(1), now_s=0)
    assert [directory.longest_prefix(chain) for _ in range(4)] == [{}, {A: 3}] * 2


# A forest: the parent of block i is block i // 3 - 2; blocks 0 to 8 begin chains.
NUM_BLOCKS = 30
TREE = tuple(FIRST_BLOCKS[:NUM_BLOCKS])
A, B, C = GROUPS = tuple(GroupId(name) for name in "abc")
MAP = ShardMap(num_shards=3, spread=frozenset([TREE[0], TREE[1], TREE[6]]))
SHARDS = tuple(Shard(shard) for shard in range(MAP.num_shards))


def chain_to(number: int) -> tuple[BlockHash, ...]:
    path = [number]
    while path[-1] // 3 >= 2:
        path.append(path[-1] // 3 - 2)
    return tuple(TREE[i] for i in reversed(path))


PROMPTS = tuple(chain_to(number) for number in range(NUM_BLOCKS))


def below(number: int) -> list[BlockHash]:
    """A block and all whose chain goes through it."""
    return [chain[-1] for chain in PROMPTS if TREE[number] in chain]


def new_shard() -> BlockDirectory:
    return BlockDirectory(max_blocks=1000, stale_after_s=10)


class ShardedMachine(RuleBasedStateMachine):
    """Groups tell one directory and a sharded one the same; each batch to each has its own fate.

    To a prompt the sharded one answers, of each group, what one directory would that had heard of
    the group as much as the prompt's shard has; and once both have heard all, they say the same.
    """

    def __init__(self) -> None:
        super().__init__()
        rows = [Row(0, 16 * len(chain), 1, chain) for chain in PROMPTS]
        self.sharding = Sharding(Trace.of(rows, name="tree", block_size=16), MAP)
        self.one = new_shard()
        self.sharded = ShardedDirectory(MAP, new_shard=new_shard)
        self.now_s = 0.0
        self.epoch = 0
        self.logs: dict[GroupId, EventLog] = {}
        self.parts: dict[GroupId, ShardedLog] = {}
        # By group, epoch, shard and events of that shard's log: what the whole group held.
        self.history: dict[tuple[GroupId, int, Shard], list[frozenset[BlockHash]]] = {}
        self.on_the_way: list[tuple[GroupId, Shard | None, EventBatch]] = []

    @initialize()
    def start(self) -> None:
        for group in GROUPS:
            self.begin_epoch(group)

    def begin_epoch(self, group: GroupId) -> None:
        self.epoch += 1
        self.logs[group] = EventLog(epoch=self.epoch, capacity=3)
        self.parts[group] = ShardedLog(epoch=self.epoch, sharding=self.sharding, capacity=3)
        for shard in SHARDS:
            self.history[group, self.epoch, shard] = [frozenset()]

    def log(self, group: GroupId, shard: Shard | None) -> EventLog:
        return self.logs[group] if shard is None else self.parts[group].parts[shard]

    def directory(self, shard: Shard | None) -> BlockDirectory:
        return self.one if shard is None else self.sharded._shards[shard]

    @rule(group=st.sampled_from(GROUPS), data=st.data(), is_removal=st.booleans())
    def change(self, group: GroupId, data: st.DataObject, is_removal: bool) -> None:
        numbers = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=3))
        told: dict[Shard | None, int] = {s: self.log(group, s).next_seq for s in (None, *SHARDS)}
        # One event of several chains, as when a request's blocks push out those of others.
        if is_removal:
            gone = [block for number in numbers for block in below(number)]
            self.logs[group].removed(gone)
            self.parts[group].removed(gone)
        else:
            come = [block for number in numbers for block in chain_to(number)]
            self.logs[group].stored(come)
            self.parts[group].stored(come)
        held = frozenset(self.logs[group].snapshot().snapshot or ())
        for shard, seq in told.items():
            log = self.log(group, shard)
            if shard is not None:
                states = self.history[group, log.epoch, shard]
                assert log.next_seq - seq in (0, 1)
                # Where the shard was told nothing, what it keeps was no different.
                states[seq:] = [states[seq], held] if log.next_seq > seq else [held]
            if log.next_seq > seq:
                self.on_the_way.append((group, shard, log.since(seq)))

    @rule(group=st.sampled_from(GROUPS), shard=st.sampled_from((None, *SHARDS)))
    def send_heartbeat(self, group: GroupId, shard: Shard | None) -> None:
        log = self.log(group, shard)
        self.on_the_way.append((group, shard, log.since(log.next_seq)))

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives, and again later", "is lost"]))
    def deliver(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        group, shard, batch = self.on_the_way[index]
        if fate != "arrives, and again later":
            self.on_the_way.pop(index)
        if fate != "is lost":
            self.tell(group, shard, batch)

    def tell(self, group: GroupId, shard: Shard | None, batch: EventBatch) -> bool:
        if shard is None:
            answer = self.one.apply(group, batch, now_s=self.now_s)
        else:
            answer = self.sharded.apply(group, batch, shard=shard, now_s=self.now_s)
        return isinstance(answer, Applied)

    @rule(group=st.sampled_from(GROUPS), shard=st.sampled_from((None, *SHARDS)))
    def resync(self, group: GroupId, shard: Shard | None) -> None:
        log = self.log(group, shard)
        position = self.directory(shard).position(group)
        is_same = position.epoch == log.epoch
        batch = log.since(position.next_seq) if is_same else log.snapshot()
        assert self.tell(group, shard, batch)

    @rule(group=st.sampled_from(GROUPS))
    def restart_under_the_same_name(self, group: GroupId) -> None:
        # What its streams still bring of the former epoch comes late or not at all; a stream that
        # was never read from brings nothing.
        for shard in (None, *SHARDS):
            if self.directory(shard).position(group).epoch != self.log(group, shard).epoch:
                self.on_the_way = [
                    (g, s, b)
                    for g, s, b in self.on_the_way
                    if (g, s, b.epoch) != (group, shard, self.log(group, shard).epoch)
                ]
        self.begin_epoch(group)

    @rule(group=st.sampled_from(GROUPS))
    def leave(self, group: GroupId) -> None:
        self.one.drop(group)
        self.sharded.drop(group)
        self.on_the_way = [way for way in self.on_the_way if way[0] != group]
        assert all(group not in self.sharded.longest_prefix(prompt) for prompt in PROMPTS)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.one.expire(now_s=self.now_s)
        silent = self.sharded.expire(now_s=self.now_s)
        for group, shard in silent:
            assert self.sharded.position(group, shard=shard).next_seq == 0
        if seconds > 10:
            assert all(stats.num_blocks == 0 for stats in self.sharded.stats())

    @rule()
    def hear_all(self) -> None:
        for group in GROUPS:
            for shard in (None, *SHARDS):
                self.resync(group, shard)
        for prompt in PROMPTS:
            assert self.sharded.longest_prefix(prompt) == self.one.longest_prefix(prompt)

    @invariant()
    def answers_like_one_directory_that_heard_as_much(self) -> None:
        for prompt in PROMPTS:
            shard = MAP.shard_of(prompt)
            if shard is None:
                continue
            expected = {}
            for group in GROUPS:
                epoch, next_seq, _ = self.sharded.position(group, shard=shard)
                held = self.history.get((group, epoch, shard), [frozenset()])[next_seq]
                length = next((i for i, h in enumerate(prompt) if h not in held), len(prompt))
                if length:
                    expected[group] = length
            assert self.sharded.longest_prefix(prompt) == expected


TestSharding = ShardedMachine.TestCase
TestSharding.settings = settings(max_examples=60, stateful_step_count=40)
