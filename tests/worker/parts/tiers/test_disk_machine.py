"""Random operations on a `DiskStore`, compared with a plain model of it."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.worker.parts.tiers.disk_blocks import FILE_BYTES, files, name, put, read, store_in

from quire.worker.parts.tiers.disk import BlockCorrupt, DiskReadError

Chain = tuple[int, ...]


def number_of(chain: Chain) -> int:
    """A distinct number for each chain, so that a block's name identifies its chain."""
    number = 1
    for each in chain:
        number = number * 3 + each + 1
    return number


class DiskMachine(RuleBasedStateMachine):
    """Writes, reads and damages chains of blocks, and lets another engine reopen the folder."""

    @initialize(num_blocks=st.integers(1, 7))
    def start(self, num_blocks: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.num_blocks = num_blocks
        self.store = store_in(self.folder, num_blocks=num_blocks)
        self.used: list[Chain] = []
        """Chains on disk, the least recently used first."""

    def use(self, chain: Chain) -> None:
        self.used.remove(chain)
        self.used.append(chain)

    def may_go(self, pinned: Chain) -> list[Chain]:
        return [
            chain
            for chain in self.used
            if chain != pinned and not any(other[:-1] == chain for other in self.used)
        ]

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def write(self, chain: Chain) -> None:
        for end in range(1, len(chain) + 1):
            self.write_one(chain[:end])

    def write_one(self, chain: Chain) -> None:
        parent = chain[:-1]
        made = put(self.store, number_of(chain), number_of(parent) if parent else None)
        if chain in self.used:
            assert not made.error
            self.use(chain)
            return
        if parent and parent not in self.used:
            assert made.error == "its parent is not on disk"
            return
        removed = []
        while len(self.used) >= self.num_blocks and self.may_go(parent):
            removed.append(self.may_go(parent)[0])
            self.used.remove(removed[-1])
        assert list(made.removed) == [name(number_of(each)) for each in removed]
        assert bool(made.error) == (len(self.used) >= self.num_blocks)
        if not made.error:
            self.used.append(chain)

    @precondition(lambda self: self.used)
    @rule(choice=st.integers(0, 99))
    def read(self, choice: int) -> None:
        chain = self.used[choice % len(self.used)]
        read(self.store, number_of(chain))
        self.use(chain)

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def match(self, chain: Chain) -> None:
        hashes = [name(number_of(chain[:end])) for end in range(1, len(chain) + 1)]
        known = [chain[:end] in self.used for end in range(1, len(chain) + 1)]
        assert self.store.match(hashes) == ([*known, False].index(False))

    @precondition(lambda self: self.used)
    @rule(choice=st.integers(0, 99), flip=st.integers(0, 379), is_lost=st.booleans())
    def damage(self, choice: int, flip: int, is_lost: bool) -> None:
        chain = self.used[choice % len(self.used)]
        file = files(self.folder)[number_of(chain)]
        if is_lost:
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            data[flip] ^= 1
            file.write_bytes(data)
        into_C = np.zeros(self.store.format.block_bytes, np.uint8)
        with pytest.raises(DiskReadError) as caught:
            self.store.read(name(number_of(chain)), into_C)
        assert isinstance(caught.value, BlockCorrupt) != is_lost
        gone = [other for other in self.used if other[: len(chain)] == chain]
        assert set(caught.value.removed) == {name(number_of(other)) for other in gone}
        self.used = [other for other in self.used if other not in gone]

    @rule(num_blocks=st.integers(1, 7))
    def restart(self, num_blocks: int) -> None:
        self.store.close()
        for age, chain in enumerate(self.used):
            os.utime(files(self.folder)[number_of(chain)], (age, age))
        self.num_blocks = num_blocks
        self.store = store_in(self.folder, num_blocks=num_blocks)
        while len(self.used) > num_blocks:
            self.used.remove(self.may_go(())[0])

    @invariant()
    def disk_and_dictionary_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = {number_of(chain): number_of(chain[:-1]) for chain in self.used}
        names = {
            name(number): None if parent == 1 else name(parent)
            for number, parent in expected.items()
        }
        assert dict(self.store.blocks()) == names
        assert set(files(self.folder)) == set(expected)
        assert self.store.num_bytes == len(self.used) * FILE_BYTES <= self.num_blocks * FILE_BYTES

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(stateful_step_count=30, deadline=None)
