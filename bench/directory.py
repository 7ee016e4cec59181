"""What the block directory costs: time for each block stored, looked up and removed, and memory.

    python bench/directory.py [--blocks N] [--groups N]

Every group holds every block. Prints one JSON object; times are CPU time of one thread, in
nanoseconds a block.
"""

import argparse
import hashlib
import json
import platform
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from quire.router.directory import BlockDirectory, GroupId
from quire.worker.events import BlocksRemoved, BlocksStored, EventBatch
from quire.worker.hashing import BlockHash

CHAIN_BLOCKS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=500_000, help="distinct blocks")
    parser.add_argument("--groups", type=int, default=16)
    arguments = parser.parse_args()
    num_chains = max(arguments.blocks // CHAIN_BLOCKS, 1)
    chains = [_chain(i) for i in range(num_chains)]
    num_blocks = num_chains * CHAIN_BLOCKS
    groups = [GroupId(f"group-{i}") for i in range(arguments.groups)]

    tracemalloc.start()
    directory = BlockDirectory(max_blocks=num_blocks)
    _store(directory, groups[0], chains)
    bytes_one_holder = tracemalloc.get_traced_memory()[0] / num_blocks
    for group in groups[1:]:
        _store(directory, group, chains)
    bytes_all_holders = tracemalloc.get_traced_memory()[0] / num_blocks
    tracemalloc.stop()

    directory = BlockDirectory(max_blocks=num_blocks)
    first_ns = _time(lambda: _store(directory, groups[0], chains)) / num_blocks
    next_ns = sum(_time(partial(_store, directory, group, chains)) for group in groups[1:]) / (
        num_blocks * max(len(groups) - 1, 1)
    )
    hit_ns = _time(lambda: [directory.longest_prefix(chain) for chain in chains]) / num_blocks
    missing = [_chain(-1 - i) for i in range(min(num_chains, 1000))]
    miss_ns = _time(lambda: [directory.longest_prefix(chain) for chain in missing])
    removed_ns = _time(lambda: _remove(directory, groups[0], chains)) / num_blocks
    drop_ns = _time(lambda: directory.drop(groups[-1]))
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "num_blocks": num_blocks,
                "num_groups": len(groups),
                "bytes_per_block_one_holder": round(bytes_one_holder, 1),
                "bytes_per_block_all_holders": round(bytes_all_holders, 1),
                "store_first_holder_ns": round(first_ns),
                "store_next_holder_ns": round(next_ns),
                "lookup_hit_ns": round(hit_ns),
                "lookup_miss_ns_per_prompt": round(miss_ns / len(missing)),
                "remove_ns": round(removed_ns),
                "drop_group_ms": round(drop_ns / 1e6, 3),
            },
            indent=2,
        )
    )


def _chain(number: int) -> list[BlockHash]:
    seed = number.to_bytes(8, "little", signed=True)
    return [
        BlockHash(hashlib.sha256(seed + i.to_bytes(4, "little")).digest())
        for i in range(CHAIN_BLOCKS)
    ]


def _store(directory: BlockDirectory, group: GroupId, chains: list[list[BlockHash]]) -> None:
    for chain in chains:
        _, seq = directory.position(group)
        batch = EventBatch(epoch=1, first_seq=seq, events=(BlocksStored(tuple(chain)),))
        directory.apply(group, batch, now_s=0)


def _remove(directory: BlockDirectory, group: GroupId, chains: list[list[BlockHash]]) -> None:
    for chain in chains:
        _, seq = directory.position(group)
        batch = EventBatch(epoch=1, first_seq=seq, events=(BlocksRemoved(tuple(chain)),))
        directory.apply(group, batch, now_s=0)


def _time(work: Callable[[], object]) -> int:
    start = time.thread_time_ns()
    work()
    return time.thread_time_ns() - start


if __name__ == "__main__":
    main()
