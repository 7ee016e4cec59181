"""The saver of evicted blocks: which blocks of a chain get slots if there are few."""

from pathlib import Path

import numpy as np
from tests.worker.parts.tiers.disk_blocks import FORMAT, store_in

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockPool
from quire.worker.parts.tiers.copies import Copies
from quire.worker.parts.tiers.disk import DiskStore
from quire.worker.parts.tiers.disk_saver import DiskSaver
from quire.worker.parts.tiers.host_tier import HostTier

SLOTS = 64


class Rig:
    """A cache, a disk, and the saver between, without a host tier. No copies are made."""

    def __init__(self, folder: Path, *, num_chains: int, length: int) -> None:
        log = EventLog(epoch=0, num_tiers=3)
        self.copies = Copies()
        self.store: DiskStore = store_in(folder, num_blocks=4 * SLOTS)
        pool = BlockPool(num_blocks=num_chains * length, block_size=4, log=log)
        self.saver = DiskSaver(
            self.store,
            pool,
            HostTier(num_slots=SLOTS, max_kept=0, log=log),
            self.copies,
            host_blocks_XC=np.zeros((SLOTS, FORMAT.block_bytes), np.uint8),
            on_corrupt=lambda *_: None,
        )
        self.chains = [
            [BlockHash(bytes([chain, index]) * 16) for index in range(length)]
            for chain in range(num_chains)
        ]
        for chain in self.chains:
            pool.register(pool.allocate(length), chain, parent=None)

    def evict_ends(self, chain: list[BlockHash], num_blocks: int) -> list[bool]:
        """Whether each of the last blocks of a chain, from its end on, is saved."""
        ends = range(len(chain) - 1, len(chain) - 1 - num_blocks, -1)
        return [self.saver.save(chain[index], chain[index - 1]) for index in ends]

    def write(self) -> None:
        """Lets a step run, and the thread write everything."""
        self.copies.submitted()
        self.copies.finished()
        self.saver.close()
        self.saver.settle()


def test_the_ends_of_two_chains_are_saved_in_one_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path, num_chains=2, length=SLOTS // 4)
    assert all(all(rig.evict_ends(chain, 3)) for chain in rig.chains)
    rig.write()
    assert [rig.store.match(chain) for chain in rig.chains] == [SLOTS // 4] * 2


def test_a_chain_that_does_not_fit_is_saved_from_its_beginning(tmp_path: Path) -> None:
    rig = Rig(tmp_path, num_chains=1, length=SLOTS)
    (chain,) = rig.chains
    assert not any(rig.evict_ends(chain, SLOTS // 2))
    assert all(rig.evict_ends(chain[: SLOTS // 2], 3))
    rig.write()
    assert rig.store.match(chain) == SLOTS // 2
    assert rig.saver.num_coming == 0
