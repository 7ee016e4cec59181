from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from quire.worker.blocks.events import BlockEvent, BlocksRemoved, BlocksStored, EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.cache.eviction import EvictionQueue, LowestUtility, PolicyFactory
from quire.worker.request.errors import NoFreeBlocks

Chain = tuple[int, ...]


class Use(NamedTuple):
    """A block's use before it became evictable."""

    last_used: int
    num_hits: int
    position: int


class Scored:
    """An eviction policy: the block with the lowest score goes."""

    def __init__(self, num_blocks: int, score: Callable[[Use], int]) -> None:
        self._score = score
        self._queue = EvictionQueue[int]()
        self._uses = [Use(0, 0, 0)] * num_blocks

    def stored(
        self, block_id: int, block_hash: BlockHash, *, position: int, now: int, num_hits: int = 0
    ) -> None:
        self._uses[block_id] = Use(0, 0, position)

    def num_hits(self, block_id: int) -> int:
        return 0

    def hit(self, block_id: int) -> None:
        use = self._uses[block_id]
        self._uses[block_id] = use._replace(num_hits=use.num_hits + 1)

    def held(self, block_id: int, *, now: int) -> None:
        self._queue.remove(block_id)

    def released(self, block_id: int, *, now: int) -> None:
        self._uses[block_id] = self._uses[block_id]._replace(last_used=now)

    def offer(self, block_id: int, *, now: int) -> None:
        self._queue.push(block_id, self._score(self._uses[block_id]))

    def evict(self, *, now: int) -> int:
        return self._queue.pop()


def by_score(score: Callable[[Use], int]) -> PolicyFactory:
    return lambda num_blocks: Scored(num_blocks, score)


POLICIES: dict[str, PolicyFactory] = {
    "default": LowestUtility,
    "oldest": by_score(lambda use: use.last_used),
    "fewest hits": by_score(lambda use: use.num_hits),
    "odd": by_score(lambda use: hash(use) % 7),
    "newest": by_score(lambda use: -use.last_used),
}


def name(chain: Chain) -> BlockHash:
    """The hash of the last block of a chain; a block's content is one number here."""
    return BlockHash(bytes(chain).ljust(32, b"\xff"))


def names(chain: Chain) -> list[BlockHash]:
    return [name(chain[: end + 1]) for end in range(len(chain))]


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=4, log=EventLog(epoch=0))


def compute(pool: BlockPool, chain: Chain) -> list[BlockId]:
    """Acts as a sequence: takes the cached prefix, fills the rest, registers all."""
    hits = pool.match(names(chain))
    pool.acquire(hits)
    blocks = hits + pool.allocate(len(chain) - len(hits))
    pool.register(blocks[len(hits) :], names(chain)[len(hits) :], parent=hits[-1] if hits else None)
    return blocks


def test_free_blocks_are_taken_before_any_cached_one_is_evicted() -> None:
    pool = make_pool(6)
    pool.release(compute(pool, (1, 2, 3)))
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 3, 0)
    pool.allocate(3)
    assert len(pool.match(names((1, 2, 3)))) == 3
    pool.allocate(1)
    assert len(pool.match(names((1, 2, 3)))) == 2


def test_of_two_prefixes_used_alike_the_one_used_longer_ago_goes_first() -> None:
    pool = make_pool(4)
    for chain in [(1, 2), (3, 4)]:
        pool.release(compute(pool, chain))
    pool.allocate(2)
    assert pool.match(names((1, 2))) == []
    assert len(pool.match(names((3, 4)))) == 2


def test_a_policy_can_let_a_prefix_that_was_hit_outlive_newer_ones_that_were_not() -> None:
    log = EventLog(epoch=0)
    pool = BlockPool(num_blocks=4, block_size=4, log=log, policy=by_score(lambda use: use.num_hits))
    pool.release(compute(pool, (1, 2)))
    pool.release(compute(pool, (1, 2)))
    pool.release(compute(pool, (3, 4)))
    pool.allocate(2)
    assert len(pool.match(names((1, 2)))) == 2
    assert pool.match(names((3, 4))) == []


def test_a_chain_loses_its_end_first_whatever_the_policy_says() -> None:
    first_is_worst = by_score(lambda use: use.position)
    pool = BlockPool(num_blocks=3, block_size=4, log=EventLog(epoch=0), policy=first_is_worst)
    pool.release(compute(pool, (1, 2, 3)))
    for length in (2, 1, 0):
        pool.allocate(1)
        assert len(pool.match(names((1, 2, 3)))) == length


def test_a_computed_block_is_never_evicted_by_the_allocation_it_serves() -> None:
    pool = make_pool(4)
    pool.release(compute(pool, (1, 2)))
    blocks = compute(pool, (1, 2, 3, 4))
    assert len(set(blocks)) == 4
    assert pool.match(names((1, 2, 3, 4))) == blocks


def test_too_few_blocks_are_refused_with_both_numbers_and_nothing_is_taken() -> None:
    pool = make_pool(4)
    pool.release(compute(pool, (1, 2)))
    hits = pool.match(names((1, 2)))
    assert pool.num_unheld(hits) == 2
    pool.acquire(hits)
    with pytest.raises(NoFreeBlocks, match="need 3 blocks, 2 available"):
        pool.allocate(3)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 0, 2)


def test_reset_is_refused_while_a_block_is_in_use() -> None:
    pool = make_pool(4)
    blocks = compute(pool, (1, 2))
    assert not pool.reset()
    assert pool.match(names((1, 2))) == blocks
    pool.release(blocks)
    assert pool.reset()
    assert (pool.num_free, pool.match(names((1, 2)))) == (4, [])


def test_the_second_writer_of_a_hash_is_given_the_first_ones_block() -> None:
    pool = make_pool(4)
    first = compute(pool, (1,))
    own = pool.allocate(1)
    assert pool.register(own, names((1,)), parent=None) == first
    pool.release(own)
    assert pool.num_held == 1
    pool.release(first)
    assert pool.num_held == 1  # The second writer now holds it too.
    pool.release(first)
    assert (pool.num_cached, pool.num_free) == (1, 3)


def test_a_block_without_a_name_is_free_once_released() -> None:
    pool = make_pool(2)
    pool.release(pool.allocate(2))
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_a_pool_of_a_million_blocks_needs_no_object_per_block() -> None:
    pool = make_pool(1_000_000)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.num_free == 999_997


class Holder(NamedTuple):
    chain: Chain
    blocks: list[BlockId]
    num_named: int


class PoolMachine(RuleBasedStateMachine):
    """Sequences that share, extend and release chains, compared with a model of sets and counts."""

    @initialize(num_blocks=st.integers(1, 10), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, num_blocks: int, policy: str) -> None:
        self.log = EventLog(epoch=0)
        self.now_s = 0.0
        self.pool = BlockPool(
            num_blocks=num_blocks,
            block_size=4,
            log=self.log,
            policy=POLICIES[policy],
            seconds=lambda: self.now_s,
        )
        self.holders: list[Holder] = []
        self.content: dict[BlockId, Chain] = {}  # The last content written to each block.
        self.stored: set[BlockHash] = set()
        self.log.subscribe(self.replay)

    def replay(self, _: int, event: BlockEvent) -> None:
        match event:
            case BlocksStored(hashes):
                assert self.stored.isdisjoint(hashes)
                self.stored |= set(hashes)
            case BlocksRemoved(hashes):
                assert self.stored.issuperset(hashes)
                self.stored -= set(hashes)

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple))
    def begin(self, chain: Chain) -> None:
        hits = self.pool.match(names(chain))
        assert [self.content[block] for block in hits] == [
            chain[: end + 1] for end in range(len(hits))
        ]
        self.pool.acquire(hits)
        self.holders.append(Holder(chain[: len(hits)], hits, len(hits)))
        self.grow(len(self.holders) - 1, chain[len(hits) :])

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), more=st.lists(st.integers(0, 1), max_size=3).map(tuple))
    def extend(self, choice: int, more: Chain) -> None:
        self.grow(choice % len(self.holders), more)

    def grow(self, index: int, more: Chain) -> None:
        holder = self.holders[index]
        if len(more) > self.pool.num_available:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(len(more))
            return
        new = self.pool.allocate(len(more))
        held = {block for other in self.holders for block in other.blocks}
        assert held.isdisjoint(new), "a block with two writers"
        chain = holder.chain + more
        for end, block in enumerate(new, len(holder.chain) + 1):
            self.content[block] = chain[:end]
        self.holders[index] = holder._replace(chain=chain, blocks=holder.blocks + new)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 4))
    def register(self, choice: int, count: int) -> None:
        index = choice % len(self.holders)
        holder = self.holders[index]
        begin, end = holder.num_named, min(holder.num_named + count, len(holder.chain))
        own = holder.blocks[begin:end]
        named = self.pool.register(
            own,
            names(holder.chain)[begin:end],
            parent=holder.blocks[begin - 1] if begin else None,
        )
        assert [self.content[block] for block in named] == [self.content[block] for block in own]
        self.pool.release([old for old, new in zip(own, named, strict=True) if old != new])
        blocks = holder.blocks[:begin] + named + holder.blocks[end:]
        self.holders[index] = holder._replace(blocks=blocks, num_named=end)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        self.pool.release(self.holders.pop(choice % len(self.holders)).blocks)

    @precondition(lambda self: self.holders)
    @rule(choice=st.integers(0, 99), tenant=st.sampled_from("ab"), keep_s=st.integers(1, 4))
    def release_and_keep(self, choice: int, tenant: str, keep_s: int) -> None:
        holder = self.holders[choice % len(self.holders)]
        self.pool.keep(holder.blocks[: holder.num_named], tenant=tenant, keep_s=keep_s)
        self.release(choice)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def reset(self) -> None:
        held = any(holder.blocks for holder in self.holders)
        assert self.pool.reset() == (not held)
        assert held or self.pool.num_free == self.pool.num_blocks

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.pool
        assert pool.num_held + pool.num_cached + pool.num_free == pool.num_blocks
        assert pool.num_held == len({b for holder in self.holders for b in holder.blocks})
        assert pool.num_available == pool.num_free + pool.num_cached

    @invariant()
    def events_replay_to_the_stored_set(self) -> None:
        assert set(self.log.snapshot().snapshot or ()) == set(self.stored)
        chains: list[Chain] = [tuple(block_hash.rstrip(b"\xff")) for block_hash in self.stored]
        for chain in chains:
            blocks = self.pool.match(names(chain))
            assert [self.content[block] for block in blocks] == [
                chain[: end + 1] for end in range(len(chain))
            ], "a chain was cut in its middle, or a block has another's name"

    @invariant()
    def what_a_holder_named_stays_known(self) -> None:
        for holder in self.holders:
            known = self.pool.match(names(holder.chain[: holder.num_named]))
            assert known == holder.blocks[: holder.num_named]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.holders:
                self.release(0)
            assert self.pool.num_held == 0
            assert len(self.pool.allocate(self.pool.num_blocks)) == self.pool.num_blocks
            assert self.stored == set()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
