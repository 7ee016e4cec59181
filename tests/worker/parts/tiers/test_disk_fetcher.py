"""Pulls of blocks from disk end, and fill granted slots in order."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.parts.tiers.disk_blocks import (
    FORMAT,
    content,
    files,
    name,
    numbers,
    put_chain,
    store_in,
)

from quire.worker.blocks.hashing import BlockHashes
from quire.worker.parts.tiers import disk_fetcher
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.disk import BlockCorrupt, DiskReadError, DiskStore
from quire.worker.parts.tiers.disk_fetcher import DiskFetcher
from quire.worker.parts.tiers.pull import Landed, Pull

PATIENCE_S = 30.0


class Wanted:
    """A pull of the blocks with these numbers, and its result."""

    def __init__(self, *numbers: int, num_slots: int = 8) -> None:
        self.changed = threading.Semaphore(0)
        self.landed: list[Landed] = []
        self.pull = Pull(
            BlockHashes.of([name(number) for number in numbers]),
            format=FORMAT,
            host_blocks_XC=np.zeros((num_slots, FORMAT.block_bytes), np.uint8),
            source=None,
            on_change=self.changed.release,
        )

    def wait(self, num_landed: int) -> None:
        while len(self.landed) < num_landed:
            assert self.changed.acquire(timeout=PATIENCE_S)
            self.landed += self.pull.take()

    def wait_for_end(self) -> str:
        while not self.pull.is_over:
            assert self.changed.acquire(timeout=PATIENCE_S)
        self.landed += self.pull.take()
        return self.pull.error

    def holds(self, slot: int, number: int) -> bool:
        return bool((self.pull.host_blocks_XC[slot] == content(number)).all())


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = store_in(tmp_path)
    put_chain(store, 1, 2, 3, 4)
    return store


@pytest.fixture
def fetch(store: DiskStore) -> Iterator[DiskFetcher]:
    fetcher = DiskFetcher(store)
    yield fetcher
    fetcher.close()


def test_blocks_land_in_order_in_the_slots_that_were_granted(fetch: DiskFetcher) -> None:
    wanted = Wanted(1, 2, 3)
    fetch(wanted.pull)
    wanted.pull.grant([5, 2])
    wanted.wait(2)
    assert not wanted.pull.is_over
    wanted.pull.grant([5])
    assert not wanted.wait_for_end()
    assert [(each.index, each.slot) for each in wanted.landed] == [(0, 5), (1, 2), (2, 5)]
    assert [each.checksum for each in wanted.landed] == [checksum_of(content(n)) for n in (1, 2, 3)]
    assert wanted.holds(2, 2)
    assert wanted.holds(5, 3)
    assert wanted.pull.num_bytes == 3 * FORMAT.block_bytes


def test_pulls_without_a_slot_keep_none_from_its_thread(fetch: DiskFetcher) -> None:
    starved = [Wanted(1, 2) for _ in range(3 * disk_fetcher.NUM_THREADS)]
    for each in starved:
        fetch(each.pull)
    fed = Wanted(1, 2, 3, 4)
    fed.pull.grant(range(4))
    fetch(fed.pull)
    assert not fed.wait_for_end()
    assert len(fed.landed) == 4
    for each in starved:
        each.pull.cancel()
        assert not each.wait_for_end()


def test_a_damaged_block_ends_the_pull_and_says_which(store: DiskStore, tmp_path: Path) -> None:
    errors: list[DiskReadError] = []
    fetcher = DiskFetcher(store, on_error=errors.append)
    os.truncate(files(tmp_path)[3], 100)
    wanted = Wanted(1, 2, 3, 4)
    wanted.pull.grant(range(4))
    fetcher(wanted.pull)
    error = wanted.wait_for_end()
    assert error == "disk: block 2 (0000000000000000): it has 100 bytes, not 380"
    assert [each.index for each in wanted.landed] == [0, 1]
    assert isinstance(errors[0], BlockCorrupt)
    assert numbers(errors[0].removed) == [4, 3]
    fetcher.close()


def test_a_block_that_made_room_meanwhile_ends_the_pull(fetch: DiskFetcher) -> None:
    wanted = Wanted(1, 9)
    wanted.pull.grant([0, 1])
    fetch(wanted.pull)
    assert "is not there any more" in wanted.wait_for_end()
    assert len(wanted.landed) == 1


def test_a_stalled_disk_holds_up_neither_others_nor_the_close(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_fetcher, "CLOSE_S", 0.05)
    stalls, is_stalled = threading.Event(), threading.Event()
    real = store.read

    def read(block: Any, into_C: Any) -> bytes:
        if block == name(4):
            is_stalled.set()
            assert stalls.wait(PATIENCE_S)
        return real(block, into_C)

    monkeypatch.setattr(store, "read", read)
    fetcher = DiskFetcher(store)
    stuck, other, waiting = Wanted(4), Wanted(1, 2), Wanted(3)
    stuck.pull.grant([0])
    fetcher(stuck.pull)
    assert is_stalled.wait(PATIENCE_S)
    other.pull.grant([0, 1])
    fetcher(other.pull)
    assert not other.wait_for_end()
    fetcher(waiting.pull)
    fetcher.close()
    assert waiting.wait_for_end() == "disk: closed"
    assert not stuck.pull.is_over  # The disk may still write to its slot.
    stalls.set()
    assert stuck.wait_for_end() in ("", "disk: closed")
    late = Wanted(1)
    fetcher(late.pull)
    assert late.wait_for_end() == "disk: closed"
