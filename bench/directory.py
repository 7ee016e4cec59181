"""Compares the block directory to Dynamo's radix tree: look-ups, events, memory.

    python -m bench.directory [--peers-python PYTHON] [--sizes N …] [--groups N …]

PYTHON is an interpreter with ``ai-dynamo-runtime``. Each subject runs in a process of its own, in
turn. Chains have 8,000 blocks. Every group holds one of them; each other chain is held by 1 to 4
groups, each up to a different length. Half of the prompts are held whole by some group, the others
up to their middle. Events are in their wire format (protobuf, JSON), with 512 blocks (a chunk of
8,192 tokens).
"""

import gc
import importlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from bench.provenance import ROOT, commit, cpu
from bench.report import command, markdown

HASH = 32
"""Bytes of a block hash."""
CHAIN_BLOCKS = 8_000
EVENT_BLOCKS = 512
PROMPT_BLOCKS = (100, 1_000, 8_000)
NUM_LOOKUPS = 400

Figures = dict[str, float]


def main() -> None:
    parser = command("bench.directory", __doc__)
    parser.add_argument("--peers-python", type=Path, help="without it: no Dynamo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--measure", choices=SUBJECTS, help="this one alone, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.sizes[0], options.groups[0])))
        return
    pythons = {"quire": Path(sys.executable), "dynamo": options.peers_python}
    lookups, rates = [], []
    for size in options.sizes:
        for groups in options.groups:
            for name, python in pythons.items():
                if python is None:
                    continue
                found = _in_process(name, size, groups, python)
                about = [f"{size:,}", str(groups)]
                for way in ("look_up", "lengths"):
                    if f"{way}_popular_p50_us" in found:
                        label = name if way == "look_up" else f"{name} as array"
                        lookups.append([*about, label, *_times(found, way)])
                kinds = [f"{found[f'{kind}_per_s'] / 1e6:.1f}" for kind in KINDS]
                rates.append([*about, name, *kinds, f"{found['bytes_per_block']:.1f}"])
    print(f"{cpu()}, Python {platform.python_version()}, commit {commit()}\n")
    print("Look-up, µs: p50 / p99. `as array` is `BlockDirectory.prefix_lengths`; `held by all` is")
    print("the chain that every group holds.\n")
    header = ["blocks", "groups", ""]
    counts = [f"{count:,}" for count in PROMPT_BLOCKS]
    print(markdown([*header, *counts, "held by all"], lookups, num_left=3))
    print("\nMillion blocks a second in events, from their wire format.\n")
    print(markdown([*header, *KINDS, "bytes per block"], rates, num_left=3))


def _in_process(name: str, num_blocks: int, num_groups: int, python: Path) -> Figures:
    print(f"{name}: {num_blocks} blocks, {num_groups} groups", file=sys.stderr)
    flags = ["--measure", name, "--sizes", str(num_blocks), "--groups", str(num_groups)]
    done = subprocess.run(
        [str(python.absolute()), "-m", "bench.directory", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env=os.environ | {"DYN_LOG": "error"},  # Else it writes a line for each decision.
        check=True,
    )
    measured: Figures = json.loads(done.stdout)
    return measured


def _times(found: Figures, way: str) -> list[str]:
    names = [f"{way}_{count}" for count in (*PROMPT_BLOCKS, "popular")]
    return [f"{found[f'{n}_p50_us']:,.1f} / {found[f'{n}_p99_us']:,.1f}" for n in names]


# One subject. It runs in Dynamo's environment too, so that each imports what it needs when made.

KINDS = ("stored", "removed", "mixed")


class Subject(Protocol):
    """``names`` are those of blocks in a row, `HASH` bytes each; events and queries are made
    outside of what is timed."""

    def stored(self, group: int, names: bytes, parent: bytes) -> Any: ...
    def removed(self, group: int, names: bytes) -> Any: ...
    def apply(self, group: int, event: Any) -> None: ...
    def query(self, names: bytes) -> Any: ...
    def look_up(self, query: Any) -> dict[Any, int]:
        """Returns the number of leading blocks that each group holds."""


class Quire:
    def __init__(self, num_blocks: int, num_groups: int) -> None:
        from quire.cluster import wire
        from quire.router.prefix_index import directory
        from quire.v1 import group_pb2
        from quire.worker.blocks import hashing

        self._wire, self._pb, self._hashes = wire, group_pb2, hashing.BlockHashes
        self._directory = directory.BlockDirectory(max_blocks=2 * num_blocks)
        self._names = [directory.GroupId(f"g{group}") for group in range(num_groups)]
        self._next_seq = [0] * num_groups

    def stored(self, group: int, names: bytes, parent: bytes) -> Any:
        return self._message(group, stored=names)

    def removed(self, group: int, names: bytes) -> Any:
        return self._message(group, removed=names)

    def apply(self, group: int, event: Any) -> None:
        batch = self._wire.events_from_proto(self._pb.EventBatch.FromString(event))
        self._directory.apply(self._names[group], batch, now_s=0)

    def query(self, names: bytes) -> Any:
        return self._hashes(names)

    def look_up(self, query: Any) -> dict[Any, int]:
        found: dict[Any, int] = self._directory.longest_prefix(query)
        return found

    def lengths(self, query: Any) -> None:
        self._directory.prefix_lengths(query)

    def _message(self, group: int, **event: bytes) -> bytes:
        seq = self._next_seq[group]
        self._next_seq[group] += 1
        message = self._pb.EventBatch(epoch=1, first_seq=seq, events=[event])
        data: bytes = message.SerializeToString()
        return data


class Dynamo:
    """``RadixTree`` of ai-dynamo-runtime; events as JSON."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self._tree = importlib.import_module("dynamo._core").RadixTree()

    def stored(self, group: int, names: bytes, parent: bytes) -> Any:
        numbers = self.query(names)
        blocks = [{"block_hash": n, "tokens_hash": n, "mm_extra_info": None} for n in numbers]
        parent_hash = self.query(parent)[0] if parent else None
        return _dynamo({"stored": {"parent_hash": parent_hash, "blocks": blocks}})

    def removed(self, group: int, names: bytes) -> Any:
        return _dynamo({"removed": {"block_hashes": self.query(names)}})

    def apply(self, group: int, event: Any) -> None:
        self._tree.apply_event(group, event)

    def query(self, names: bytes) -> list[int]:
        return list(memoryview(names).cast("Q")[::4]) if names else []

    def look_up(self, query: Any) -> dict[Any, int]:
        found: dict[Any, int] = self._tree.find_matches(query).scores
        return found


SUBJECTS: dict[str, Callable[[int, int], Subject]] = {"quire": Quire, "dynamo": Dynamo}


def measure(name: str, num_blocks: int, num_groups: int) -> Figures:
    """Chain 0 is held by all groups; each other one by 1 to 4, of which the first holds all."""
    subject = SUBJECTS[name](num_blocks, num_groups)
    num_chains = max(num_blocks // CHAIN_BLOCKS, 2)
    gc.collect()
    before = _rss_bytes()
    seconds, num_stored = 0.0, 0
    for number in range(num_chains):
        chain = _chain(number)
        for group, length in _holders(number, num_chains, num_groups):
            spans = _spans(0, length)
            events = [_stored(subject, group, chain, *span) for span in spans]
            seconds += _apply(subject, group, events)
            num_stored += length
    found = {
        "bytes_per_block": (_rss_bytes() - before) / (num_chains * CHAIN_BLOCKS),
        "stored_per_s": num_stored / seconds,
    }
    draw = random.Random(1)
    queries: dict[str, list[Any]] = {}
    for count in PROMPT_BLOCKS:
        for index in range(NUM_LOOKUPS):
            known = count // (1 + index % 2)  # The other half of the prompt was never seen.
            chain = _chain(draw.randrange(1, num_chains))[: HASH * known]
            query = subject.query(chain + draw.randbytes(HASH * (count - known)))
            queries.setdefault(str(count), []).append(query)
        assert max(subject.look_up(queries[str(count)][1]).values()) == count // 2
    queries["popular"] = [subject.query(_chain(0))] * 50
    assert len(subject.look_up(queries["popular"][0])) == num_groups
    for way in ("look_up", "lengths"):
        if hasattr(subject, way):
            for what, each in queries.items():
                found |= _quantiles(f"{way}_{what}", getattr(subject, way), each)
    return found | _changes(subject, num_chains, num_groups)


def _changes(subject: Subject, num_chains: int, num_groups: int) -> Figures:
    """Takes ends of chains away, and puts and takes more."""
    removed_s, mixed_s, num_blocks = 0.0, 0.0, 0
    for number in range(1, min(num_chains, 60)):
        chain = _chain(number)
        group, length = next(_holders(number, num_chains, num_groups))
        spans = _spans(length - 2048, length)
        taken = [
            subject.removed(group, chain[HASH * start : HASH * stop])
            for start, stop in reversed(spans)
        ]
        removed_s += _apply(subject, group, taken)
        mixed = []
        for start, stop in spans:
            mixed.append(_stored(subject, group, chain, start, stop))
            mixed.append(subject.removed(group, chain[HASH * start : HASH * stop]))
            mixed.append(_stored(subject, group, chain, start, stop))
        mixed_s += _apply(subject, group, mixed)
        num_blocks += 2048
    return {"removed_per_s": num_blocks / removed_s, "mixed_per_s": 3 * num_blocks / mixed_s}


def _stored(subject: Subject, group: int, chain: bytes, start: int, stop: int) -> Any:
    parent = chain[HASH * (start - 1) : HASH * start] if start else b""
    return subject.stored(group, chain[HASH * start : HASH * stop], parent)


def _spans(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + EVENT_BLOCKS, stop)) for at in range(start, stop, EVENT_BLOCKS)]


def _holders(number: int, num_chains: int, num_groups: int) -> Iterator[tuple[int, int]]:
    """Groups and how much of a chain each holds."""
    if number == 0:
        yield from ((group, CHAIN_BLOCKS) for group in range(num_groups))
        return
    num_holders = min(1 + number % 4, num_groups)
    for holder in range(num_holders):
        length = CHAIN_BLOCKS * (num_holders - holder) // num_holders
        yield (number * 7 + holder * 3) % num_groups, length


def _chain(number: int) -> bytes:
    return random.Random(number).randbytes(HASH * CHAIN_BLOCKS)


def _apply(subject: Subject, group: int, events: list[Any]) -> float:
    begin = time.perf_counter()
    for event in events:
        subject.apply(group, event)
    return time.perf_counter() - begin


def _quantiles(name: str, work: Callable[[Any], object], queries: list[Any]) -> Figures:
    """Quantiles of the times; the first few calls only warm up."""
    for query in queries[:5]:
        work(query)
    times = []
    for query in queries:
        _touch(query)
        begin = time.perf_counter_ns()
        work(query)
        times.append((time.perf_counter_ns() - begin) / 1000)
    times.sort()
    p50, p99 = statistics.median(times), times[len(times) * 99 // 100]
    return {f"{name}_p50_us": p50, f"{name}_p99_us": p99}


def _touch(query: Any) -> None:
    """A prompt is looked up when it was just hashed: it is in the CPU's cache."""
    data = getattr(query, "data", None)
    if isinstance(data, bytes):
        zlib.crc32(data)  # Unlike a copy, leaves memory and its translation as they were.
    elif isinstance(query, list):
        sum(query)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _dynamo(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()


if __name__ == "__main__":
    main()
