"""Comparisons of kept blocks with their checksums, over several steps."""

import numpy as np
import pytest

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.engine.part import Slot
from quire.worker.parts.tiers.checker import Checker
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.host_tier import HostTier

NUM_BLOCKS, BLOCK_BYTES = 12, 64


def step(checker: Checker) -> None:
    """A step that begins when the thread is done."""
    if checker._check is not None:
        checker._check.checksums[-1].result()
    checker.settle()


def test_a_prefix_that_grows_while_it_is_compared_is_used_two_steps_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of it leaves the KV cache meanwhile than the engine's thread may compare."""
    monkeypatch.setattr("quire.worker.parts.tiers.checker._AT_ONCE_BYTES", 2 * BLOCK_BYTES)
    blocks_XC = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    host_tier = HostTier(num_slots=NUM_BLOCKS, max_kept=10, log=EventLog(epoch=0, num_tiers=2))
    checker = Checker(host_tier, host_blocks_XC=blocks_XC, on_change=lambda: None)
    slots = list[Slot]()
    for number in range(8):
        slot = host_tier.keep(BlockHash(bytes([number]) * 32), None, num_hits=0)
        assert slot is not None
        host_tier.filled(slot, checksum_of(blocks_XC[slot]))
        host_tier.unpin(slot)
        slots.append(slot)
    assert not checker.may_use(slots[4:])
    step(checker)
    assert not checker.may_use(slots)
    step(checker)
    assert checker.may_use(slots)
    assert all(checker.is_whole(slot) for slot in slots)
    checker.close()
