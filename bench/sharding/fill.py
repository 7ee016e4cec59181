"""Shards filled to their share of a large cluster's blocks, one after the other in this process.

A chain has 100 to 8,000 blocks, 1,070 on average, and 1 to 4 groups hold it, each up to an end of
its own, any of the groups with the same chance. So most sets of holders are of few groups, and
with ten thousand groups hardly any two chains have the same. Chain 0, of 64 blocks, is a system
prompt that every group holds, and that is spread: every shard keeps it.
"""

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.router.directory import BlockDirectory, GroupId
from quire.router.sharding import shard_of
from quire.worker.events import BlocksStored, EventBatch
from quire.worker.hashing import HASH_BYTES, BlockHash, BlockHashes

LENGTHS = {100: 0.3, 300: 0.3, 1000: 0.25, 3000: 0.1, 8000: 0.05}
"""Blocks of a chain, and the share of chains that have so many."""

PROMPT_BLOCKS = (100, 1000, 8000)
EVENT_BLOCKS = 512
"""A prefill chunk of 8,192 tokens."""
HEAD_BLOCKS = 64
NUM_LOOKUPS = 400

Holding = tuple[int, int]
"""A group, and how many blocks of a chain it holds."""


@dataclass(frozen=True, slots=True)
class Chain:
    number: int
    length: int
    holdings: tuple[Holding, ...]


def names(chain: Chain) -> bytes:
    """Of its blocks; the first is what it is sharded by."""
    rest = np.random.default_rng(chain.number).bytes(HASH_BYTES * (chain.length - 1))
    return _anchor(chain.number) + rest


def population(*, num_blocks: int, num_groups: int, num_shards: int) -> list[list[Chain]]:
    """All chains by shard; ``num_blocks`` is of all shards together."""
    draw = random.Random(0)
    shards: list[list[Chain]] = [[] for _ in range(num_shards)]
    sizes, weights = list(LENGTHS), list(LENGTHS.values())
    number = 0
    while num_blocks > 0:
        number += 1
        (length,) = draw.choices(sizes, weights)
        num_holders = min(1 + number % 4, num_groups)
        groups = draw.sample(range(num_groups), num_holders)
        ends = (length * (num_holders - i) // num_holders for i in range(num_holders))
        chain = Chain(number, length, tuple(zip(groups, ends, strict=True)))
        shards[shard_of(_anchor(number), num_shards=num_shards)].append(chain)
        num_blocks -= length
    return shards


class FilledShard:
    """One shard's directory. Times are this thread's CPU time: others may use the machine."""

    def __init__(self, chains: list[Chain], *, num_groups: int) -> None:
        self._chains = chains
        self._groups = [GroupId(f"group-{number:05}") for number in range(num_groups)]
        self._head = Chain(0, HEAD_BLOCKS, tuple((g, HEAD_BLOCKS) for g in range(num_groups)))
        self._num_blocks = sum(chain.length for chain in chains) + HEAD_BLOCKS

    def fill(self) -> dict[str, float]:
        """From the groups' events."""
        before = _rss_bytes()
        self._directory = directory = self._new_directory()
        next_seq = [0] * len(self._groups)
        num_events = num_stored = 0
        times_ns: list[int] = []
        for chain in (self._head, *self._chains):
            data = names(chain)
            for group, end in chain.holdings:
                for start in range(0, end, EVENT_BLOCKS):
                    stop = min(start + EVENT_BLOCKS, end)
                    event = BlocksStored(BlockHashes(data[HASH_BYTES * start : HASH_BYTES * stop]))
                    batch = EventBatch(epoch=1, first_seq=next_seq[group], events=(event,))
                    next_seq[group] += 1
                    began_ns = time.thread_time_ns()
                    directory.apply(self._groups[group], batch, now_s=0)
                    times_ns.append(time.thread_time_ns() - began_ns)
                    num_stored += stop - start
                    num_events += 1
        stats = directory.stats()
        assert stats.num_blocks == self._num_blocks, (stats.num_blocks, self._num_blocks)
        times_ns.sort()
        return {
            "num_chains": len(self._chains),
            "num_blocks": stats.num_blocks,
            "num_holdings": num_stored,
            "num_sets": stats.num_sets,
            "bytes_per_block": stats.num_bytes / stats.num_blocks,
            "rss_per_block": (_rss_bytes() - before) / stats.num_blocks,
            "blocks_per_s": num_stored / (sum(times_ns) / 1e9),
            "event_p50_us": times_ns[num_events // 2] / 1e3,
            "event_p99_us": times_ns[num_events * 99 // 100] / 1e3,
            "event_max_us": times_ns[-1] / 1e3,
        }

    def look_up(self) -> dict[str, float]:
        """Half of the prompts are held to their end, half up to their middle."""
        draw = random.Random(1)
        result: dict[str, float] = {}
        for num_blocks in PROMPT_BLOCKS:
            long_enough = [chain for chain in self._chains if chain.length >= num_blocks]
            prompts = []
            for index in range(NUM_LOOKUPS):
                data = names(draw.choice(long_enough))[: HASH_BYTES * num_blocks]
                if index % 2:
                    middle = HASH_BYTES * (num_blocks // 2)
                    data = data[:middle] + draw.randbytes(len(data) - middle)
                prompts.append(BlockHashes(data))
            longest = max(self._directory.longest_prefix(prompts[1]).values())
            assert longest == num_blocks // 2, (longest, num_blocks)
            self._time(result, f"look_up_{num_blocks}", prompts)
        head = names(self._head)
        system = [BlockHashes(head + draw.randbytes(HASH_BYTES * 936)) for _ in range(100)]
        assert len(self._directory.longest_prefix(system[0])) == len(self._groups)
        self._time(result, "head", system)
        return result

    def refill(self) -> dict[str, float]:
        """As a shard that restarted: from a snapshot of each group, in no order."""
        chains: list[list[Holding]] = [[] for _ in self._groups]
        for index, chain in enumerate(self._chains):
            for group, end in chain.holdings:
                chains[group].append((index, end))
        del self._directory
        directory = self._new_directory()
        seconds, num_names, slowest_s = 0.0, 0, 0.0
        head = names(self._head)
        for group, held in enumerate(chains):
            parts = [names(self._chains[index])[: HASH_BYTES * end] for index, end in held]
            rows = np.frombuffer(b"".join([head, *parts]), dtype=f"V{HASH_BYTES}")
            snapshot = BlockHashes(np.random.default_rng(group).permutation(rows).tobytes())
            batch = EventBatch(epoch=1, first_seq=1, snapshot=snapshot)
            began_s = time.thread_time()
            directory.apply(self._groups[group], batch, now_s=0)
            took_s = time.thread_time() - began_s
            seconds += took_s
            slowest_s = max(slowest_s, took_s)
            num_names += len(snapshot)
        assert directory.stats().num_blocks == self._num_blocks
        return {
            "refill_s": seconds,
            "refill_bytes": HASH_BYTES * num_names,
            "refill_blocks_per_s": num_names / seconds,
            "slowest_snapshot_ms": 1e3 * slowest_s,
        }

    def _new_directory(self) -> BlockDirectory:
        return BlockDirectory(max_blocks=2 * self._num_blocks)

    def _time(self, result: dict[str, float], name: str, prompts: list[BlockHashes]) -> None:
        asked = {
            "": self._directory.longest_prefix,
            "_array": self._directory.prefix_lengths,
        }
        for suffix, ask in asked.items():
            times = []
            for prompt in prompts:
                sum(prompt.data[::64])  # It was just hashed: it is in the CPU's cache.
                began_ns = time.perf_counter_ns()
                ask(prompt)
                times.append((time.perf_counter_ns() - began_ns) / 1e3)
            times.sort()
            result[f"{name}{suffix}_p50_us"] = times[len(times) // 2]
            result[f"{name}{suffix}_p99_us"] = times[len(times) * 99 // 100]


def measure(
    *, num_blocks: int, num_groups: int, num_shards: int, only: Sequence[int]
) -> Iterator[dict[str, float]]:
    """A row for each shard of ``only``, of which the first is filled again as after a restart."""
    shards = population(num_blocks=num_blocks, num_groups=num_groups, num_shards=num_shards)
    mean = sum(chain.length for chains in shards for chain in chains) / num_shards
    for shard in only:
        filled = FilledShard(shards[shard], num_groups=num_groups)
        row: dict[str, float] = {"shard": shard, **filled.fill()}
        row["share"] = row["num_blocks"] / mean
        row |= filled.look_up()
        if shard == only[0]:
            row |= filled.refill()
        yield row


def _anchor(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"chain %d" % number).digest())


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
