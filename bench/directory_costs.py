"""The cost of one subject of `bench/directory.py`, in a process of its own:

    python -m bench.directory_costs NAME NUM_BLOCKS NUM_GROUPS

Prints one JSON object. Needs nothing but the subject, so that it runs in Dynamo's environment.
"""

import gc
import json
import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.directory_subjects import HASH, SUBJECTS

CHAIN_BLOCKS = 8_000
EVENT_BLOCKS = 512
"""A prefill chunk of 8,192 tokens."""
PROMPT_BLOCKS = (100, 1_000, 8_000)
PROMPT_TOKENS = (16_384, 131_072)
NUM_LOOKUPS = 400


def measure(name: str, num_blocks: int, num_groups: int) -> dict[str, float]:
    """Chain 0 is held by all groups; each other one by 1 to 4, of which the first holds all."""
    subject = SUBJECTS[name](num_blocks, num_groups)
    num_chains = max(num_blocks // CHAIN_BLOCKS, 2)
    gc.collect()
    before = _rss_bytes()
    seconds, num_stored = 0.0, 0
    for number in range(num_chains):
        chain = _chain(number)
        for group, length in _holders(number, num_chains, num_groups):
            events = [
                subject.stored(group, chain, start, min(start + EVENT_BLOCKS, length))
                for start in range(0, length, EVENT_BLOCKS)
            ]
            seconds += _apply(subject, group, events)
            num_stored += length
    result = {
        "bytes_per_block": (_rss_bytes() - before) / (num_chains * CHAIN_BLOCKS),
        "stored_per_s": num_stored / seconds,
    }
    draw = random.Random(1)
    for num_prompt_blocks in PROMPT_BLOCKS:
        queries = []
        for index in range(NUM_LOOKUPS):
            number = draw.randrange(1, num_chains)
            chain = _chain(number)[: HASH * num_prompt_blocks]
            if index % 2:  # The other half of the prompt was never seen.
                chain = chain[: HASH * (num_prompt_blocks // 2)] + draw.randbytes(
                    HASH * (num_prompt_blocks - num_prompt_blocks // 2)
                )
            queries.append(subject.query(chain))
            if index == 1:
                assert max(subject.look_up(queries[-1]).values()) == num_prompt_blocks // 2
        _add_times(result, f"look_up_{num_prompt_blocks}", subject.look_up, queries)
        if hasattr(subject, "lengths"):
            _add_times(result, f"lengths_{num_prompt_blocks}", subject.lengths, queries)
    popular = subject.query(_chain(0))
    found = subject.look_up(popular)
    assert len(found) == num_groups, len(found)
    _add_times(result, "look_up_popular", subject.look_up, [popular] * 50)
    if hasattr(subject, "lengths"):
        _add_times(result, "lengths_popular", subject.lengths, [popular] * 50)
    for what in ("decide", "hash_only"):
        for count in PROMPT_TOKENS:
            if hasattr(subject, what):
                prompts = [subject.tokens(count)] * 50
                _add_times(result, f"{what}_{count}", getattr(subject, what), prompts)
    _add_changes(result, subject, num_chains, num_groups)
    return result


def _add_changes(result: dict[str, float], subject: Any, num_chains: int, num_groups: int) -> None:
    """Takes ends of chains away, and puts and takes more, in events of many and of one block."""
    for size in (EVENT_BLOCKS, 1):
        times = {"removed": 0.0, "mixed": 0.0}
        num_blocks = 0
        for number in range(1, min(num_chains, 60)):
            chain = _chain(number)
            group, length = next(_holders(number, num_chains, num_groups))
            start = length - (2048 if size > 1 else 64)
            spans = [(at, at + size) for at in range(start, length, size)]
            removed = [subject.removed(group, chain, *span) for span in reversed(spans)]
            times["removed"] += _apply(subject, group, removed)
            mixed = []
            for span in spans:
                mixed.append(subject.stored(group, chain, *span))
                mixed.append(subject.removed(group, chain, *span))
                mixed.append(subject.stored(group, chain, *span))
            times["mixed"] += _apply(subject, group, mixed)
            num_blocks += length - start
        suffix = "" if size > 1 else "_one_by_one"
        result[f"removed_per_s{suffix}"] = num_blocks / times["removed"]
        result[f"mixed_per_s{suffix}"] = 3 * num_blocks / times["mixed"]


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


def _apply(subject: Any, group: int, events: list[Any]) -> float:
    begin = time.perf_counter()
    for event in events:
        subject.apply(group, event)
    return time.perf_counter() - begin


def _add_times(
    result: dict[str, float], name: str, work: Callable[[Any], object], arguments: list[Any]
) -> None:
    """In microseconds. The first few calls only warm up."""
    for argument in arguments[:5]:
        work(argument)
    times = []
    for argument in arguments:
        _touch(argument)
        begin = time.perf_counter_ns()
        work(argument)
        times.append((time.perf_counter_ns() - begin) / 1000)
    times.sort()
    result[f"{name}_p50_us"] = statistics.median(times)
    result[f"{name}_p99_us"] = times[len(times) * 99 // 100]


def _touch(argument: Any) -> None:
    """A prompt is looked up when it was just hashed: it is in the CPU's cache."""
    data = getattr(argument, "data", None)
    if isinstance(data, bytes):
        zlib.crc32(data)  # Unlike a copy, leaves memory and its translation as they were.
    elif isinstance(argument, list):
        sum(argument)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
