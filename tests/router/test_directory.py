"""The directory against sets of sets, under any fate of the events on their way."""

import hashlib
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.router.directory import Applied, BlockDirectory, GroupId, NeedsResync
from quire.worker.events import BlocksRemoved, BlocksStored, EventBatch, EventLog
from quire.worker.hashing import BlockHash

UNIVERSE = tuple(BlockHash(hashlib.sha256(bytes([i])).digest()) for i in range(10))
GROUPS = tuple(GroupId(name) for name in ("a", "b", "c"))

some_blocks = st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=6, unique=True).map(tuple)
some_group = st.sampled_from(GROUPS)


def stored(*hashes: BlockHash, epoch: int = 1, first_seq: int = 0) -> EventBatch:
    return EventBatch(epoch=epoch, first_seq=first_seq, events=(BlocksStored(hashes),))


def held(directory: BlockDirectory, group: GroupId) -> set[BlockHash]:
    return {h for h in UNIVERSE if group in directory.longest_prefix([h])}


class DirectoryMachine(RuleBasedStateMachine):
    """Groups log events; their batches are lost, doubled, reordered, late; groups restart.

    What a group holds according to the directory must be what its log held at the position that
    the directory says it is at, always; and positions only go forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = BlockDirectory(stale_after_s=10)
        self.now_s = 0.0
        self.logs: dict[GroupId, EventLog] = {}
        self.epochs: dict[GroupId, list[int]] = defaultdict(list)
        # The sets after 0, 1, 2, … events of a group's epoch.
        self.states: dict[tuple[GroupId, int], list[frozenset[BlockHash]]] = {}
        self.on_the_way: list[tuple[GroupId, EventBatch]] = []
        self.delivered: set[tuple[GroupId, int]] = set()
        self.positions: dict[GroupId, tuple[int, int]] = {}

    @initialize()
    def start(self) -> None:
        for group in GROUPS:
            self.begin_epoch(group)

    def begin_epoch(self, group: GroupId) -> None:
        # Not in rising order: an epoch's number says nothing of its age.
        epoch = (len(self.epochs[group]) + 1) * 7919 % 10007
        self.epochs[group].append(epoch)
        self.logs[group] = EventLog(epoch=epoch, capacity=3)
        self.states[group, epoch] = [frozenset()]

    @rule(group=some_group, hashes=some_blocks, is_removal=st.booleans())
    def change(self, group: GroupId, hashes: tuple[BlockHash, ...], is_removal: bool) -> None:
        log = self.logs[group]
        states = self.states[group, log.epoch]
        seq = log.next_seq
        if is_removal:
            log.removed(hashes)
            states.append(states[-1] - set(hashes))
        else:
            log.stored(hashes)
            states.append(states[-1] | set(hashes))
        self.on_the_way.append((group, log.since(seq)))

    @rule(group=some_group, behind=st.integers(0, 4))
    def send_again(self, group: GroupId, behind: int) -> None:
        """A heartbeat, a replay that overlaps, or a snapshot."""
        log = self.logs[group]
        self.on_the_way.append((group, log.since(max(log.next_seq - behind, 0))))

    @rule(group=some_group)
    def send_snapshot(self, group: GroupId) -> None:
        self.on_the_way.append((group, self.logs[group].snapshot()))

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        group, batch = self.on_the_way[index] if keep else self.on_the_way.pop(index)
        answer = self.directory.apply(group, batch, now_s=self.now_s)
        self.delivered.add((group, batch.epoch))
        if isinstance(answer, NeedsResync):
            assert (answer.epoch, answer.next_seq) == self.directory.position(group)

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.on_the_way.pop(data.draw(st.integers(0, len(self.on_the_way) - 1)))

    @rule(group=some_group)
    def resync(self, group: GroupId) -> None:
        log = self.logs[group]
        epoch, next_seq = self.directory.position(group)
        answer = log.since(next_seq) if epoch == log.epoch else log.snapshot()
        assert isinstance(self.directory.apply(group, answer, now_s=self.now_s), Applied)
        self.delivered.add((group, log.epoch))
        assert held(self.directory, group) == self.states[group, log.epoch][-1]

    @rule(group=some_group)
    def restart_under_the_same_name(self, group: GroupId) -> None:
        if len(self.epochs[group]) > 8:
            return
        epoch = self.epochs[group][-1]
        if (group, epoch) not in self.delivered:
            # Its stream was never read from, so nothing of it can come late.
            self.on_the_way = [
                (g, batch) for g, batch in self.on_the_way if (g, batch.epoch) != (group, epoch)
            ]
        self.begin_epoch(group)

    @rule(group=some_group)
    def leave(self, group: GroupId) -> None:
        self.directory.drop(group)
        self.positions.pop(group, None)
        self.on_the_way = [(g, batch) for g, batch in self.on_the_way if g != group]
        self.delivered = {(g, epoch) for g, epoch in self.delivered if g != group}
        assert held(self.directory, group) == set()

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        for group in self.directory.expire(now_s=self.now_s):
            self.positions.pop(group, None)
            assert held(self.directory, group) == set()
        if seconds > 10:
            assert self.directory.stats().num_blocks == 0

    @invariant()
    def holds_what_the_log_held_at_the_position(self) -> None:
        total, union = 0, set()
        for group in GROUPS:
            epoch, next_seq = self.directory.position(group)
            states = self.states.get((group, epoch), [frozenset()])
            blocks = held(self.directory, group)
            assert blocks == states[next_seq]
            assert self.directory.num_blocks(group) == len(blocks)
            total += len(blocks)
            union |= blocks
        stats = self.directory.stats()
        assert (stats.num_holdings, stats.num_blocks) == (total, len(union))

    @invariant()
    def positions_only_go_forward(self) -> None:
        for group in GROUPS:
            epoch, next_seq = self.directory.position(group)
            if epoch:
                position = (self.epochs[group].index(epoch), next_seq)
                assert position >= self.positions.get(group, (0, 0))
                self.positions[group] = position

    @rule(hashes=st.lists(st.sampled_from(UNIVERSE), max_size=12))
    def look_up(self, hashes: list[BlockHash]) -> None:
        expected = {}
        for group in GROUPS:
            blocks = held(self.directory, group)
            length = next((i for i, h in enumerate(hashes) if h not in blocks), len(hashes))
            if length:
                expected[group] = length
        assert self.directory.longest_prefix(hashes) == expected


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=40)


@given(
    st.lists(st.tuples(some_group, st.booleans(), some_blocks), max_size=30),
    st.integers(1, 6),
)
@settings(max_examples=60)
def test_a_full_directory_claims_less_but_nothing_false(
    changes: list[tuple[GroupId, bool, tuple[BlockHash, ...]]], max_blocks: int
) -> None:
    directory = BlockDirectory(max_blocks=max_blocks)
    logs = {group: EventLog(epoch=1) for group in GROUPS}
    truth: dict[GroupId, set[BlockHash]] = defaultdict(set)
    for group, is_removal, hashes in changes:
        if is_removal:
            logs[group].removed(hashes)
            truth[group] -= set(hashes)
        else:
            logs[group].stored(hashes)
            truth[group] |= set(hashes)
        directory.apply(group, logs[group].since(directory.position(group)[1]), now_s=0)
        assert directory.stats().num_blocks <= max_blocks
        for name in GROUPS:
            assert held(directory, name) <= truth[name]


def test_a_dead_groups_blocks_make_room_for_others() -> None:
    directory = BlockDirectory(max_blocks=4)
    directory.apply(GROUPS[0], stored(*UNIVERSE[:4]), now_s=0)
    directory.apply(GROUPS[1], stored(*UNIVERSE[3:5]), now_s=0)
    assert held(directory, GROUPS[1]) == {UNIVERSE[3]}
    assert directory.stats().num_refused_blocks == 1
    directory.drop(GROUPS[0])
    directory.apply(GROUPS[1], stored(*UNIVERSE[5:8], first_seq=1), now_s=0)
    assert held(directory, GROUPS[1]) == {UNIVERSE[3], *UNIVERSE[5:8]}


def test_a_new_epoch_forgets_the_old_and_late_batches_of_that_change_nothing() -> None:
    directory = BlockDirectory()
    directory.apply(GROUPS[0], stored(*UNIVERSE[:3], epoch=9), now_s=0)
    directory.apply(GROUPS[1], stored(UNIVERSE[0]), now_s=0)
    directory.apply(GROUPS[0], stored(UNIVERSE[4], epoch=2), now_s=0)
    assert held(directory, GROUPS[0]) == {UNIVERSE[4]}
    late = stored(UNIVERSE[5], epoch=9, first_seq=1)
    assert directory.apply(GROUPS[0], late, now_s=0) == Applied(0)
    assert held(directory, GROUPS[0]) == {UNIVERSE[4]}
    assert directory.position(GROUPS[0]) == (2, 1)
    assert directory.stats().num_late_batches == 1
    assert held(directory, GROUPS[1]) == {UNIVERSE[0]}


def test_a_gap_names_the_event_to_go_on_from_and_changes_nothing() -> None:
    directory = BlockDirectory()
    directory.apply(GROUPS[0], stored(UNIVERSE[0], epoch=5), now_s=0)
    late = EventBatch(epoch=5, first_seq=3, events=(BlocksRemoved((UNIVERSE[0],)),))
    assert directory.apply(GROUPS[0], late, now_s=0) == NeedsResync(5, 1)
    assert held(directory, GROUPS[0]) == {UNIVERSE[0]}
    assert directory.stats().num_gaps == 1


def test_a_heartbeat_ahead_of_the_directory_shows_the_loss() -> None:
    directory = BlockDirectory()
    heartbeat = EventBatch(epoch=5, first_seq=2)
    assert directory.apply(GROUPS[0], heartbeat, now_s=0) == NeedsResync(5, 0)


def test_heartbeats_keep_a_group_but_gaps_do_not() -> None:
    directory = BlockDirectory(stale_after_s=10)
    for group in GROUPS[:2]:
        directory.apply(group, stored(UNIVERSE[0]), now_s=0)
    directory.apply(GROUPS[0], EventBatch(epoch=1, first_seq=1), now_s=9)
    directory.apply(GROUPS[1], EventBatch(epoch=1, first_seq=9), now_s=9)
    assert directory.expire(now_s=11) == [GROUPS[1]]
    assert directory.longest_prefix([UNIVERSE[0]]) == {GROUPS[0]: 1}


def test_prefixes_are_found_across_the_chunks_of_a_long_prompt() -> None:
    prompt = [BlockHash(hashlib.sha256(i.to_bytes(4, "big")).digest()) for i in range(1000)]
    directory = BlockDirectory()
    for group, length in zip(GROUPS, (1000, 256, 257), strict=True):
        directory.apply(group, stored(*prompt[:length]), now_s=0)
    assert directory.longest_prefix(prompt) == dict(zip(GROUPS, (1000, 256, 257), strict=True))


def test_memory_does_not_grow_with_the_number_of_holders() -> None:
    directory = BlockDirectory()
    prompt = [BlockHash(hashlib.sha256(i.to_bytes(4, "big")).digest()) for i in range(500)]
    for i in range(100):
        directory.apply(GroupId(f"group-{i}"), stored(*prompt), now_s=0)
    stats = directory.stats()
    assert (stats.num_blocks, stats.num_holdings) == (500, 50_000)
    assert set(directory.longest_prefix(prompt).values()) == {500}
