"""Host memory for blocks is touched in the background, which changes nothing in it."""

import gc
import threading
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

from quire.worker.blocks.kv_format import KvFormat
from quire.worker.rank.host_memory import map_host_blocks
from quire.worker.request.config import STAGING_BYTES

FORMAT = KvFormat(num_layers=4, num_kv_heads=8, head_bytes=16384, block_size=64)
NUM_SLOTS = (3 * STAGING_BYTES) // FORMAT.block_bytes


def touching() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "quire-kv-touch"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


def test_all_of_it_is_there_before_its_first_use() -> None:
    before = resident_bytes()
    blocks_XC = map_host_blocks(FORMAT, num_slots=NUM_SLOTS)
    assert blocks_XC is not None
    blocks_XC[-1] = 7
    for each in touching():
        each.join()
    if resident_bytes() - before < 1.5 * STAGING_BYTES:
        pytest.skip("this kernel cannot populate memory")
    assert resident_bytes() - before > 0.9 * blocks_XC.nbytes
    assert np.all(blocks_XC[-1] == 7)
    assert not blocks_XC[:-1].any()


def test_a_thread_ends_with_the_memory_that_it_touches() -> None:
    before = resident_bytes()
    assert map_host_blocks(FORMAT, num_slots=NUM_SLOTS) is not None
    gc.collect()
    for each in touching():
        each.join()
    assert resident_bytes() - before < STAGING_BYTES
