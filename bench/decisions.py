"""The cost of one routing decision, by the number of groups.

    python -m bench.decisions [--groups N …] [--rounds N] [--beside CHECKOUT] [--output FILE.md]

Times `RoutingTable.route` as it is, and as in another checkout of this project (`before`). Each
runs in a process of its own, in turn, ``--rounds`` times; a number in the tables is the median over
the rounds. The cases:

    mixed    prompts of 250 blocks, which up to four groups hold; frames of three groups arrive
             between two decisions
    begun    the same, and the first 50 blocks are held by every group
    idle     no group has anything to do or holds anything: all costs are equal
    tokens   prompts of 16,384 and 131,072 tokens that no group holds, up to the decision; and the
             time of hashing alone

Times are this thread's CPU time.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from bench.checkout import interpreter_of
from bench.provenance import ROOT
from bench.report import command, markdown

from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId, NeedsResync
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import HASH_BYTES, BlockHashes, hash_blocks, root_hash

BLOCK_SIZE = 16
NUM_BLOCKS = 250
NUM_SHARED_BLOCKS = 50
NUM_PROMPTS = 200
NUM_FRAMES = 3
MAX_IN_FLIGHT = 100
PROMPT_TOKENS = (16_384, 131_072)

Times = dict[str, float]
"""Microseconds by case and quantile."""


def main() -> None:
    parser = command("bench.decisions", __doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16, 64, 512, 2048, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decisions", type=int, default=600, help="fewer where groups are many")
    parser.add_argument("--beside", type=Path, help="another checkout, timed as `before`")
    parser.add_argument("--output", type=Path, help="of the tables; they are printed anyway")
    parser.add_argument(
        "--travels", action="store_true", help="also with groups that exchange blocks"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        (num_groups,) = arguments.groups
        print(json.dumps(measure(num_groups, arguments.decisions, travels=arguments.travels)))
        return
    rows = {}
    for num_groups in arguments.groups:
        rows[num_groups] = _rounds(
            num_groups,
            arguments.rounds,
            arguments.decisions,
            arguments.beside,
            travels=arguments.travels,
        )
        print(json.dumps({num_groups: rows[num_groups]}), file=sys.stderr, flush=True)
    text = report(rows)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def measure(num_groups: int, num_decisions: int, *, travels: bool) -> Times:
    """All cases in this process. ``travels``: groups exchange blocks, and have host memory."""
    make = partial(_Cluster, num_groups, travels=travels)
    num_decisions = max(min(num_decisions, 500_000 // num_groups), 20)
    return {
        **_quantiles("mixed", _decide(make(), num_decisions)),
        **_quantiles("begun", _decide(make(shared=True), num_decisions)),
        **_quantiles("idle", _decide_idle(make(idle=True), num_decisions)),
        **_from_tokens(make(), num_decisions),
    }


class _Cluster:
    """A table that knows of groups, their loads and their caches."""

    def __init__(
        self,
        num_groups: int,
        *,
        shared: bool = False,
        idle: bool = False,
        travels: bool = False,
    ) -> None:
        self.draw = draw = random.Random(0)
        self.table = RoutingTable(block_size=BLOCK_SIZE)
        self.groups = [GroupId(f"group-{number:05}") for number in range(num_groups)]
        if travels:
            self.table.update_members(self.groups, lenders=self.groups)
        else:
            self.table.update_members(self.groups)
        self._num_tiers = 1 + travels
        beginning = draw.randbytes(HASH_BYTES * NUM_SHARED_BLOCKS) if shared else b""
        num_bytes = HASH_BYTES * NUM_BLOCKS - len(beginning)
        self.prompts = [
            BlockHashes(beginning + draw.randbytes(num_bytes)) for _ in range(NUM_PROMPTS)
        ]
        if idle:
            return
        for group in self.groups:
            self.table.update_load(group, _load(draw))
            if shared:
                self._hold(group, BlockHashes(beginning))
        for number, prompt in enumerate(self.prompts):
            for holder in draw.sample(self.groups, min(number % 5, num_groups)):
                self._hold(holder, prompt)

    def some_frames(self) -> None:
        for _ in range(NUM_FRAMES):
            self.table.update_load(self.draw.choice(self.groups), _load(self.draw))

    def _hold(self, group: GroupId, hashes: BlockHashes) -> None:
        seq = self.table.events_position(group).next_seq
        events = [BlocksStored(hashes)]
        if self._num_tiers > 1:  # The second half of the chain is in host memory.
            half = len(hashes) // 2
            events = [BlocksStored(hashes[:half]), BlocksStored(hashes[half:], 1)]
        batch = EventBatch(epoch=1, first_seq=seq, events=tuple(events))
        if isinstance(self.table.apply_events(group, batch), NeedsResync):
            raise RuntimeError("a group must begin with both tiers")


def _decide(cluster: _Cluster, num_decisions: int) -> Iterator[float]:
    for number in range(num_decisions):
        cluster.some_frames()
        yield _time_route(cluster, number)
        if number >= MAX_IN_FLIGHT:
            cluster.table.completed(str(number - MAX_IN_FLIGHT))


def _decide_idle(cluster: _Cluster, num_decisions: int) -> Iterator[float]:
    for number in range(num_decisions):
        yield _time_route(cluster, number)
        cluster.table.completed(str(number))


def _time_route(cluster: _Cluster, number: int) -> float:
    prompt = cluster.prompts[number % NUM_PROMPTS]
    num_tokens = BLOCK_SIZE * NUM_BLOCKS + 10
    began_ns = time.thread_time_ns()
    cluster.table.route(str(number), hashes=prompt, num_prompt_tokens=num_tokens)
    return (time.thread_time_ns() - began_ns) / 1e3


def _from_tokens(cluster: _Cluster, num_decisions: int) -> Times:
    root = root_hash(model_fingerprint="m", kv_dtype="f", block_size=BLOCK_SIZE)
    found: Times = {}
    for num_tokens in PROMPT_TOKENS:
        tokens = np.arange(num_tokens, dtype=np.uint32)
        whole, hashing = [], []
        for number in range(num_decisions):
            cluster.some_frames()
            tokens[0] = number
            began_ns = time.thread_time_ns()
            hashes = hash_blocks(tokens, block_size=BLOCK_SIZE, root=root)
            hashed_ns = time.thread_time_ns()
            cluster.table.route(str(number), hashes=hashes, num_prompt_tokens=num_tokens)
            whole.append((time.thread_time_ns() - began_ns) / 1e3)
            hashing.append((hashed_ns - began_ns) / 1e3)
            cluster.table.completed(str(number))
        found |= _quantiles(f"tokens_{num_tokens}", whole)
        found |= _quantiles(f"hashing_{num_tokens}", hashing)
    return found


def _quantiles(name: str, times_us: Iterable[float]) -> Times:
    times = sorted(times_us)
    return {f"{name}_p50": times[len(times) // 2], f"{name}_p99": times[len(times) * 99 // 100]}


def _rounds(
    num_groups: int,
    num_rounds: int,
    num_decisions: int,
    beside: Path | None,
    *,
    travels: bool,
) -> dict[str, Times]:
    """Each way in turn."""
    ways = {"now": sys.executable}
    if travels:
        ways["travels"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        if beside is not None:
            ways["before"] = interpreter_of(beside, Path(folder))
        found: dict[str, list[Times]] = {way: [] for way in ways}
        for _ in range(num_rounds):
            for way, python in ways.items():
                more = ["--travels"] if way == "travels" else []
                found[way].append(_in_process(num_groups, num_decisions, python, more))
    return {
        way: {name: median(each[name] for each in times) for name in times[0]}
        for way, times in found.items()
    }


def _in_process(num_groups: int, num_decisions: int, python: str, more: list[str]) -> Times:
    flags = ["--measure", "--groups", str(num_groups), "--decisions", str(num_decisions)]
    flags += more
    done = subprocess.run(
        [python, "-m", "bench.decisions", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        check=True,
    )
    measured: Times = json.loads(done.stdout)
    return measured


def report(rows: Mapping[int, Mapping[str, Times]]) -> str:
    """By number of groups and way."""
    shown = {"mixed": "mixed", "begun": "begun", "idle": "idle"}
    for n in PROMPT_TOKENS:
        shown |= {f"tokens_{n}": f"{n:,} tokens", f"hashing_{n}": "hashing"}
    cells = [
        [f"{num_groups:,}", way]
        + [f"{times[f'{n}_p50']:,.1f} / {times[f'{n}_p99']:,.1f}" for n in shown]
        for num_groups, ways in rows.items()
        for way, times in ways.items()
    ]
    return f"µs, p50 / p99.\n\n{markdown(['groups', '', *shown.values()], cells, num_left=9)}\n"


def _load(draw: random.Random) -> GroupLoad:
    return GroupLoad(
        num_running=draw.randrange(30),
        num_waiting=draw.randrange(3),
        num_pending_prefill_tokens=draw.randrange(8000),
        num_available_blocks=draw.randrange(1000),
        num_steps=draw.randrange(1000),
    )


if __name__ == "__main__":
    main()
