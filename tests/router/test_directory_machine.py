"""The block directory against plain sets, with events lost, doubled, reordered or late."""

import hashlib
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from quire.router.prefix_index import native_index as native_holders
from quire.router.prefix_index.directory import (
    Applied,
    BlockDirectory,
    GroupId,
    NeedsResync,
    Position,
)
from quire.router.prefix_index.index import Lengths, PrefixIndex
from quire.router.prefix_index.native_index import NativePrefixIndex
from quire.router.prefix_index.python_index import PythonPrefixIndex
from quire.worker.blocks.events import (
    MAX_TIERS,
    BlockEvent,
    BlocksStored,
    EventBatch,
    EventLog,
)
from quire.worker.blocks.hashing import BlockHash

NUM_BLOCKS = 12
GROUPS = tuple(GroupId(name) for name in ("a", "b", "c"))


def name_of(number: int) -> BlockHash:
    """Name of a block in one of three buckets, so that buckets hold blocks of several chains."""
    digest = bytearray(hashlib.sha256(bytes([number])).digest())
    digest[7] = number % 3
    return BlockHash(bytes(digest))


UNIVERSE = tuple(name_of(number) for number in range(NUM_BLOCKS))
"""A tree: block i's parent is block (i - 1) // 2."""


def chain_to(number: int) -> tuple[BlockHash, ...]:
    """The chain of blocks from the root to a block, as in a prompt."""
    path = [number]
    while path[-1]:
        path.append((path[-1] - 1) // 2)
    return tuple(UNIVERSE[i] for i in reversed(path))


def below(number: int) -> set[BlockHash]:
    """A block and all blocks whose chains contain it."""
    return {UNIVERSE[i] for i in range(NUM_BLOCKS) if UNIVERSE[number] in chain_to(i)}


some_block = st.integers(0, NUM_BLOCKS - 1)
some_group = st.sampled_from(GROUPS)


def held(directory: BlockDirectory, group: GroupId) -> set[BlockHash]:
    return {h for h in UNIVERSE if group in directory.longest_prefix([h])}


def held_by_tier(directory: BlockDirectory, group: GroupId) -> list[set[BlockHash]]:
    """For each tier that the directory knows of, the blocks in it or in a faster one."""
    held: list[set[BlockHash]] = [set() for _ in directory.slots(group)]
    for name in UNIVERSE:
        lengths = directory.prefix_lengths([name])
        for tier, slot in enumerate(directory.slots(group)):
            held[tier] |= {name} if lengths[slot] else set()
    return held


Tiers = tuple[frozenset[BlockHash], ...]
"""For each tier the blocks in it or in a faster one."""


class Story:
    """The state after each event of an epoch."""

    def __init__(self, num_tiers: int) -> None:
        self.facts: list[set[BlockHash]] = [set() for _ in range(num_tiers)]
        self.fastest: dict[BlockHash, int] = {}
        self.states: list[Tiers] = [self.now()]

    def now(self) -> Tiers:
        return tuple(
            frozenset(name for name, fastest in self.fastest.items() if fastest <= tier)
            for tier in range(len(self.facts))
        )

    def hear(self, seq: int, event: BlockEvent) -> None:
        assert seq == len(self.states) - 1
        for name in event.hashes:
            if isinstance(event, BlocksStored):
                assert self.fastest.get(name) != event.tier, "nothing new"
                self.fastest[name] = event.tier
            else:
                del self.fastest[name]
        self.states.append(self.now())

    def check(self) -> None:
        for tier, cumulative in enumerate(self.states[-1]):
            assert cumulative == set().union(*self.facts[: tier + 1])


def native(max_blocks: int) -> PrefixIndex:
    library = native_holders.library()
    if library is None:
        pytest.skip("no C++ compiler")
    return NativePrefixIndex(library, max_blocks=max_blocks)


def python(max_blocks: int) -> PrefixIndex:
    return PythonPrefixIndex(max_blocks=max_blocks)


IMPLEMENTATIONS: tuple[Callable[[int], PrefixIndex], ...] = (native, python)


def both(*, max_blocks: int = 1000, stale_after_s: float = 30) -> list[BlockDirectory]:
    """A directory over each implementation of the index."""
    return [
        BlockDirectory(max_blocks=max_blocks, stale_after_s=stale_after_s, index=make(max_blocks))
        for make in IMPLEMENTATIONS
    ]


class DirectoryMachine(RuleBasedStateMachine):
    """Groups log events; their batches are lost, doubled, reordered, late; groups restart.

    What a group holds according to the directory must be what its log held at the position that
    the directory says it is at, always; and positions only go forward. Where the index was
    tampered with, that is so again as soon as a digest was compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directories = both(stale_after_s=10)
        self.now_s = 0.0
        self.logs: dict[GroupId, EventLog] = {}
        self.epochs: dict[GroupId, list[int]] = defaultdict(list)
        self.stories: dict[tuple[GroupId, int], Story] = {}
        self.on_the_way: list[tuple[GroupId, EventBatch]] = []
        self.delivered: set[tuple[GroupId, int]] = set()
        self.positions: dict[GroupId, tuple[int, int]] = {}
        self.tampered: set[GroupId] = set()

    @initialize()
    def start(self) -> None:
        for group in GROUPS:
            self.begin_epoch(group)

    def begin_epoch(self, group: GroupId) -> None:
        # Not in rising order: an epoch's number says nothing of its age.
        epoch = (len(self.epochs[group]) + 1) * 7919 % 10007
        self.epochs[group].append(epoch)
        num_tiers = 1 + epoch % MAX_TIERS
        self.logs[group] = EventLog(epoch=epoch, num_tiers=num_tiers, capacity=3)
        self.stories[group, epoch] = Story(num_tiers)
        self.logs[group].subscribe(self.stories[group, epoch].hear)

    def apply(self, group: GroupId, batch: EventBatch) -> Applied | NeedsResync:
        was = self.position(group)
        answers = [d.apply(group, batch, now_s=self.now_s) for d in self.directories]
        assert answers[0] == answers[1]
        self.delivered.add((group, batch.epoch))
        now = self.position(group)
        if now.epoch != was.epoch or (batch.snapshot is not None and batch.buckets is None):
            self.tampered -= {group} if now[:2] != was[:2] else set()
        return answers[0]

    def position(self, group: GroupId) -> Position:
        positions = [directory.position(group) for directory in self.directories]
        assert positions[0] == positions[1]
        return positions[0]

    @rule(
        group=some_group,
        number=some_block,
        tier=st.integers(0, MAX_TIERS - 1),
        is_removal=st.booleans(),
    )
    def change(self, group: GroupId, number: int, tier: int, is_removal: bool) -> None:
        log = self.logs[group]
        story = self.stories[group, log.epoch]
        tier %= len(log._tiers)
        seq = log.next_seq
        if is_removal:
            log.removed(below(number), tier)
            story.facts[tier] -= below(number)
        else:
            log.stored(chain_to(number), tier)
            story.facts[tier] |= set(chain_to(number))
        story.check()
        assert log.next_seq == len(story.states) - 1
        self.on_the_way.append((group, log.since(seq)))

    @rule(group=some_group, behind=st.integers(0, 4))
    def send_again(self, group: GroupId, behind: int) -> None:
        """Sends a heartbeat, an overlapping replay, or a snapshot."""
        log = self.logs[group]
        self.on_the_way.append((group, log.since(max(log.next_seq - behind, 0))))

    @rule(group=some_group, buckets=st.one_of(st.none(), st.sets(st.integers(0, 2)).map(bytes)))
    def send_snapshot(self, group: GroupId, buckets: bytes | None) -> None:
        self.on_the_way.append((group, self.logs[group].snapshot(buckets)))

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        group, batch = self.on_the_way[index] if keep else self.on_the_way.pop(index)
        answer = self.apply(group, batch)
        if isinstance(answer, NeedsResync):
            assert answer == NeedsResync(*self.position(group))

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.on_the_way.pop(data.draw(st.integers(0, len(self.on_the_way) - 1)))

    @rule(group=some_group)
    def resync(self, group: GroupId) -> None:
        log = self.logs[group]
        for _ in range(3):  # Events, the digest's buckets, their blocks.
            position = self.position(group)
            if position.epoch == log.epoch:
                batches = log.replay(position.next_seq, buckets=position.drifted)
            else:
                batches = [log.snapshot()]
            answers = [self.apply(group, batch) for batch in batches]
            if isinstance(answers[-1], Applied):
                break
        assert isinstance(answers[-1], Applied)
        self.tampered.discard(group)
        for directory in self.directories:
            assert held_by_tier(directory, group) == list(self.stories[group, log.epoch].states[-1])

    @rule(group=some_group, number=some_block, is_removal=st.booleans(), data=st.data())
    def tamper(self, group: GroupId, number: int, is_removal: bool, data: st.DataObject) -> None:
        if not self.directories[0].slots(group):
            return
        tier = data.draw(st.integers(0, len(self.directories[0].slots(group)) - 1))
        for directory in self.directories:
            change = directory._index.remove if is_removal else directory._index.add
            change(UNIVERSE[number], slot=directory.slots(group)[tier])
        self.tampered.add(group)

    @rule(group=some_group)
    def restart_under_the_same_name(self, group: GroupId) -> None:
        if len(self.epochs[group]) > 8:
            return
        epoch = self.epochs[group][-1]
        if (group, epoch) not in self.delivered:
            # Its stream was never read, so none of its events can arrive late.
            self.on_the_way = [
                (g, batch) for g, batch in self.on_the_way if (g, batch.epoch) != (group, epoch)
            ]
        self.begin_epoch(group)

    @rule(group=some_group)
    def leave(self, group: GroupId) -> None:
        for directory in self.directories:
            directory.drop(group)
            assert held(directory, group) == set()
        self.tampered.discard(group)
        self.positions.pop(group, None)
        self.on_the_way = [(g, batch) for g, batch in self.on_the_way if g != group]
        self.delivered = {(g, epoch) for g, epoch in self.delivered if g != group}

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        silent, silent_too = (d.expire(now_s=self.now_s) for d in self.directories)
        assert silent == silent_too
        for group in silent:
            self.positions.pop(group, None)
            self.tampered.discard(group)
            assert all(held(directory, group) == set() for directory in self.directories)
        if seconds > 10:
            assert all(d.stats().num_blocks == 0 for d in self.directories)

    @invariant()
    def holds_what_the_log_held_at_the_position(self) -> None:
        for directory in self.directories:
            total, union = 0, set()
            for group in GROUPS:
                epoch, next_seq, _ = directory.position(group)
                story = self.stories.get((group, epoch))
                by_tier = held_by_tier(directory, group)
                if story is not None and group not in self.tampered:
                    assert by_tier == list(story.states[next_seq])
                assert held(directory, group) == set().union(*by_tier[:1])
                blocks = set().union(*by_tier[-1:])
                assert directory.num_blocks(group) == len(blocks)
                total += len(blocks)
                for each in by_tier:
                    union |= each
            stats = directory.stats()
            assert (stats.num_holdings, stats.num_blocks) == (total, len(union))

    @invariant()
    def positions_only_go_forward(self) -> None:
        for group in GROUPS:
            epoch, next_seq, _ = self.position(group)
            if epoch:
                position = (self.epochs[group].index(epoch), next_seq)
                assert position >= self.positions.get(group, (0, 0))
                self.positions[group] = position

    @rule(number=some_block)
    def look_up(self, number: int) -> None:
        prompt = chain_to(number)
        for directory in self.directories:
            expected = {}
            for group in GROUPS:
                blocks = held(directory, group)
                length = next((i for i, h in enumerate(prompt) if h not in blocks), len(prompt))
                if length:
                    expected[group] = length
            found = directory.longest_prefix(prompt)
            if not self.tampered:
                assert found == expected
            assert found.keys() == expected.keys()
            for group, length in found.items():
                assert prompt[length - 1] in held(directory, group)
                assert prompt[length : length + 1] == () or (
                    prompt[length] not in held(directory, group)
                )
            lengths = directory.prefix_lengths(prompt)
            assert {g: n for g in GROUPS if (n := _at(lengths, directory.slots(g)))} == found
            self.check_slower_tiers(directory, prompt)

    def check_slower_tiers(self, directory: BlockDirectory, prompt: tuple[BlockHash, ...]) -> None:
        for group in set(GROUPS) - self.tampered:
            for tier, blocks in enumerate(held_by_tier(directory, group)):
                length = next((i for i, h in enumerate(prompt) if h not in blocks), len(prompt))
                lengths = directory.prefix_lengths(prompt)
                assert lengths[directory.slots(group)[tier]] == length


def _at(lengths: Lengths, slots: tuple[int, ...]) -> int:
    return int(lengths[slots[0]]) if slots else 0


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=examples(60), stateful_step_count=40)


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
@given(
    changes=st.lists(st.tuples(some_group, st.booleans(), some_block), max_size=30),
    max_blocks=st.integers(1, 6),
)
@settings(max_examples=examples(60))
def test_a_full_directory_claims_less_but_nothing_false(
    make: Callable[[int], PrefixIndex],
    changes: list[tuple[GroupId, bool, int]],
    max_blocks: int,
) -> None:
    directory = BlockDirectory(max_blocks=max_blocks, index=make(max_blocks))
    logs = {group: EventLog(epoch=1) for group in GROUPS}
    truth: dict[GroupId, set[BlockHash]] = defaultdict(set)
    for group, is_removal, number in changes:
        if is_removal:
            logs[group].removed(below(number))
            truth[group] -= below(number)
        else:
            logs[group].stored(chain_to(number))
            truth[group] |= set(chain_to(number))
        directory.apply(group, logs[group].since(directory.position(group)[1]), now_s=0)
        assert directory.stats().num_blocks <= max_blocks
        for name in GROUPS:
            assert held(directory, name) <= truth[name]
