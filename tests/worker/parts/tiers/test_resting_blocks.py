"""Bytes that change wherever a block rests outside the KV cache are noticed before they are used.

Each test changes a byte at one place of the table in `quire.worker.parts.tiers.transfers`. It runs
with comparisons in the engine's thread and in a thread of its own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.conftest import owner
from tests.worker.engine_requests import MakeEngine, range_prompt, request, run

from quire.worker.blocks.hashing import BlockHashes
from quire.worker.blocks.kv_format import Bytes, PeerSource
from quire.worker.engine.part import Slot
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.disk import DiskStore
from quire.worker.parts.tiers.loan import Loan
from quire.worker.parts.tiers.pull import Pull
from quire.worker.parts.tiers.transfers import Transfers

SIZE = 4
BLOCK_BYTES = SIZE * 3 * 8
PROMPT = range_prompt(81)
"""A prompt of 20 blocks, and a token."""
OTHER = range_prompt(81, first=30)
LONG_S = 60.0


class Rig:
    def __init__(self, make_engine: MakeEngine, **options: Any) -> None:
        self.pulls: list[Pull] = []
        self.engine, self.executor = make_engine(
            **{"num_blocks": 25, **options},
            host_kv_bytes=256 * BLOCK_BYTES,
            fetch=self.pulls.append,
            max_num_batched_tokens=512,
        )
        self.names = names_of(self.engine)
        assert self.engine.transfers is not None
        self.transfers: Transfers = self.engine.transfers

    @property
    def num_corrupt(self) -> int:
        return self.engine.stats().num_corrupt_blocks

    def evict(self) -> None:
        """Computes the prompt and then another one, which takes most of its blocks."""
        for prompt in (PROMPT, OTHER):
            self.engine.add_request(request("r", prompt, max_tokens=1))
            while self.engine._sequences:
                self.engine.step()

    def flip(self, slot: int) -> None:
        self.transfers.host_blocks_XC[slot, 9] ^= 1

    def step_until(self, is_done: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(10_000):
            if is_done():
                return
            self.engine.step()
            pause.wait(0.001)
        raise AssertionError("it never came")


@pytest.fixture(params=["at once", "in a thread"])
def rig(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Rig]:
    monkeypatch.setattr("quire.worker.parts.tiers.transfers._WAIT_S", 0.0)
    if request.param == "in a thread":
        for limit in ("_AT_ONCE_BYTES", "_SMALL_BYTES"):
            monkeypatch.setattr(f"quire.worker.parts.tiers.checker.{limit}", 0)
    return lambda **options: Rig(make_engine, **options)


def names_of(engine: GroupEngine) -> BlockHashes:
    return BlockHashes.of(engine._intake.sequence(request("x", PROMPT), 1).hashes)


def right_bytes(index: int) -> Bytes:
    positions = range(index * SIZE, (index + 1) * SIZE)
    words = [[PROMPT[each], each, owner("")] for each in positions]
    return np.array(words, np.int64).reshape(-1).view(np.uint8)


def test_a_block_that_has_just_left_the_cache(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum waits for no thread, so no byte can change before it is known."""
    group = rig(kv_offloading_size=30 * BLOCK_BYTES / 2**30)
    with monkeypatch.context() as threads_stand_still:
        threads_stand_still.setattr(ThreadPoolExecutor, "submit", lambda *_: Future())
        group.evict()
    slots = group.transfers.match(group.names[len(group.engine._pool.match(group.names)) :])
    assert len(slots) > 6
    group.flip(slots[2])
    run(group.engine, request("again", PROMPT, max_tokens=1))
    assert group.num_corrupt == 1


def test_a_block_that_waits_to_be_used(
    rig: Callable[..., Rig], generate: Callable[..., tuple[list[int], str]]
) -> None:
    """A request's blocks are compared, and it then waits for its turn."""
    group = rig(kv_offloading_size=30 * BLOCK_BYTES / 2**30, max_num_seqs=1)
    group.evict()
    slots = group.transfers.match(group.names[len(group.engine._pool.match(group.names)) :])
    assert len(slots) > 6
    group.engine.add_request(request("runs", [7, 8, 9], max_tokens=40, ignore_eos=True))
    group.engine.step()
    group.engine.add_request(request("again", PROMPT, max_tokens=3, ignore_eos=True))
    group.step_until(lambda: not group.engine.arriving)
    group.flip(slots[2])
    assert group.num_corrupt == 0
    ended = run(group.engine)
    right, _ = generate(PROMPT, max_tokens=3, stop=())
    assert list(ended["again"].token_ids) == right
    assert group.num_corrupt == 1


def test_a_block_that_was_compared_for_a_request_that_left(rig: Callable[..., Rig]) -> None:
    group = rig(kv_offloading_size=30 * BLOCK_BYTES / 2**30)
    group.evict()
    checker = group.transfers.checker
    slots = group.transfers.match(group.names[len(group.engine._pool.match(group.names)) :])
    while not checker.may_use(slots):
        checker.settle()
    checker.settle()
    group.flip(slots[2])
    assert [checker.is_whole(slot) for slot in slots[1:4]] == [True, False, True]


def test_a_block_that_waits_for_the_disk(
    rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    written = DiskStore.put

    def put(*args: Any) -> Any:
        may_write.wait(LONG_S)
        return written(*args)

    monkeypatch.setattr(DiskStore, "put", put)
    group = rig(kv_disk_dir=tmp_path, kv_disk_size=1)
    group.evict()
    saver, disk = group.transfers._saver, group.transfers._disk
    assert saver is not None
    assert disk is not None
    group.step_until(lambda: len(saver._jobs) > 6)
    job, _ = saver._jobs[2]
    group.flip(job.slot)
    may_write.set()
    group.step_until(lambda: not saver.num_coming)
    assert group.num_corrupt == 1
    assert job.name not in disk
    num_saved = disk.match(group.names)
    assert 0 < num_saved < len(group.names)
    into_C = np.zeros(BLOCK_BYTES, np.uint8)
    for index in range(num_saved):
        disk.read(group.names[index], into_C)
        assert (into_C == right_bytes(index)).all()
    group.engine.close()


def test_a_block_that_waits_to_be_sent(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=64)
    run(group.engine, request("first", PROMPT, max_tokens=1))
    loan = group.engine.lend(group.names, borrower_format=group.executor.kv_format)
    assert isinstance(loan, Loan)
    group.step_until(lambda: len(loan._ready) > 4)
    group.flip(loan._ready[3].slot)
    sent = [loan.next(0) for _ in range(4)]
    assert [lent and lent.checksum for lent in sent] == [
        *[checksum_of(right_bytes(index)) for index in range(3)],
        None,
    ]
    assert loan.error.endswith("is corrupt")
    group.engine.step()
    assert group.num_corrupt == 1


def test_a_block_that_was_received(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=64)
    source = PeerSource(group_id="other", address="", num_blocks=20)
    group.engine.add_request(request("r", PROMPT, max_tokens=1, source=source))
    pull = group.pulls[0]
    slots = []
    for index in range(5):
        slot = pull.next_slot(0)
        assert slot is not None
        pull.host_blocks_XC[slot] = right_bytes(index)
        pull.landed(index, slot, checksum_of(right_bytes(index)))
        slots.append(Slot(slot))
    group.flip(slots[3])
    group.step_until(lambda: group.num_corrupt == 1)
    assert pull.is_cancelled
    pull.end()
    ended = run(group.engine)
    assert ended["r"].num_cached_tokens == 3 * SIZE
    assert not group.transfers.has_work
