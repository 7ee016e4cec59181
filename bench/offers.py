"""What it costs a gateway to take a request, to have it wait or to refuse it, by groups.

    python -m bench.offers [--groups N …] [--rounds N] [--beside CHECKOUT] [--output FILE.md]

Times `Admission.offer`, for which the table is asked for the groups' states: as it is, and as in
another checkout of this project (`before`). Each runs in a process of its own, in turn,
``--rounds`` times; a number in the table is the median over the rounds. Between two offers come
``--frames`` frames of any groups. The cases:

    free      every group can begin a request at once; each is released and routed, and ends
    few free  one group in sixteen can
    waits     no group can; each waits behind others
    refused   no group can, and as many wait as may
    after all the same, and every group's frame has come since the last
    frame     one frame of a group, for the table and for admission, where requests are refused

Times are this thread's CPU time.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from quire.cluster.admission.admission import Admission
from quire.cluster.admission.capacity import Capacity
from quire.cluster.admission.config import AdmissionConfig
from quire.cluster.admission.ticket import Stage, Ticket
from quire.cluster.errors import Overloaded
from quire.router.directory import GroupId
from quire.router.table import GroupLoad, RoutingTable
from quire.v1 import group_pb2 as pb

NUM_SLOTS = 16
NUM_BLOCKS = 4096
STEP_S = 0.05
MEAN_TOKENS = 2000
"""Of prompts, about."""
NUM_WAITING = 100
"""Requests at the gateway in `waits`."""
UNBOUNDED = 10**6
FREE_IN = {"free": 1, "few free": 16, "waits": None, "refused": None}
"""One group in so many is free."""
CASES = (*FREE_IN, "after all", "frame")
PARTS = ("cluster", "worker", "kernels", "proto", "router")
"""Folders of a checkout from which it is imported."""

Times = dict[str, float]
"""Microseconds, by case and quantile."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offers", type=int, default=300, help="fewer where groups are many")
    parser.add_argument("--frames", type=int, default=3, help="between two offers")
    parser.add_argument("--beside", type=Path, help="another checkout, timed as `before`")
    parser.add_argument("--output", type=Path, help="of the table; it is printed anyway")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        (num_groups,) = arguments.groups
        print(json.dumps(measure(num_groups, arguments.offers, arguments.frames)))
        return
    ways: dict[str, Path | None] = {"now": None}
    if arguments.beside:
        ways["before"] = arguments.beside
    rows: dict[int, dict[str, list[Times]]] = {
        num_groups: {way: [] for way in ways} for num_groups in arguments.groups
    }
    for _ in range(arguments.rounds):
        for num_groups, row in rows.items():
            for way, checkout in ways.items():
                row[way].append(
                    _in_process(num_groups, arguments.offers, arguments.frames, checkout)
                )
    text = report(rows)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def measure(num_groups: int, num_offers: int, num_frames: int) -> Times:
    """All cases in this process."""
    num_offers = max(min(num_offers, 100_000 // num_groups), 40)
    found: Times = {}
    for case in FREE_IN:
        gateway = _Gateway(num_groups, case)
        first, offers, frames = gateway.time_offer(), [], []
        for _ in range(num_offers):
            frames += [gateway.time_frame() for _ in range(num_frames)]
            offers.append(gateway.time_offer())
        found |= _quantiles(case, offers)
        if case == "refused":
            found |= _quantiles("frame", frames) | _quantiles("after all", [first])
    return found


class _Gateway:
    """Admission and routing around groups that never change from being free or full."""

    def __init__(self, num_groups: int, case: str) -> None:
        self._draw = random.Random(0)
        self._case = case
        self._now_s = 0.0
        self._num_waiting = 2
        wait_s = 1e6 if case == "waits" else 1.0
        config = AdmissionConfig(
            max_queue_wait_s=wait_s, standing_wait_s=wait_s, max_queued_requests=UNBOUNDED
        )
        self._capacity = Capacity()
        self._admission = Admission(config, self._capacity)
        self._table = RoutingTable(block_size=16, clock=lambda: self._now_s)
        self._names = [GroupId(f"group-{number:05}") for number in range(num_groups)]
        self._table.update_members(self._names)
        each = FREE_IN[case]
        # The one is not always the first that is looked at.
        members = [state.group for state in self._table.states()]
        self._free = set(members[each // 2 :: each] or members[-1:]) if each else set()
        self._num_steps = dict.fromkeys(self._names, 0)
        for name in self._names * 3:
            self._frame(name)
        if case == "waits":
            for _ in range(NUM_WAITING):
                self._offer(self._ticket())
        elif case == "refused":
            many = Ticket(num_requests=50, num_prompt_tokens=50 * MEAN_TOKENS)
            while self._offer(replace(many)):
                pass
            self._num_waiting *= 2  # At each group, so that no frame makes room for one more.
            for name in self._names:
                self._frame(name)

    def time_frame(self) -> float:
        return self._frame(self._draw.choice(self._names))

    def time_offer(self) -> float:
        ticket = self._ticket()
        self._now_s += STEP_S / len(self._names)
        began_ns = time.thread_time_ns()
        self._offer(ticket)
        time_us = (time.thread_time_ns() - began_ns) / 1e3
        stage = Stage.RELEASED if self._free else Stage.QUEUED
        assert ticket.stage is (Stage.NEW if self._case == "refused" else stage)
        if ticket.stage is Stage.RELEASED:
            name = str(ticket.number)
            self._table.route(name, hashes=(), num_prompt_tokens=ticket.num_prompt_tokens)
            self._admission.routed(ticket)
            self._table.completed(name)
        self._admission.leave(ticket)
        return time_us

    def _ticket(self) -> Ticket:
        num_tokens = self._draw.randrange(MEAN_TOKENS // 4, 2 * MEAN_TOKENS)
        return Ticket(num_prompt_tokens=num_tokens, max_tokens=200)

    def _offer(self, ticket: Ticket) -> bool:
        try:
            self._admission.offer(ticket, self._table.states(), now_s=self._now_s)
        except Overloaded:
            return False
        return True

    def _frame(self, name: GroupId) -> float:
        self._num_steps[name] = num_steps = self._num_steps[name] + 1
        is_free, self._now_s = name in self._free, self._now_s + STEP_S / len(self._names)
        draw = self._draw
        description = pb.GroupDescription(
            group_id=name, epoch=1, max_num_seqs=NUM_SLOTS, block_size=16
        )
        load = pb.Load(
            num_running=draw.randrange(4) if is_free else NUM_SLOTS,
            num_waiting=0 if is_free else self._num_waiting,
            num_pending_prefill_tokens=0
            if is_free
            else self._num_waiting * draw.randrange(2000, 3000),
            num_free_blocks=draw.randrange(NUM_BLOCKS // 2, NUM_BLOCKS),
            num_prompt_tokens=512 * num_steps,
            num_output_tokens=NUM_SLOTS * num_steps,
            num_gateways=2,
        )
        began_ns = time.thread_time_ns()
        self._table.update_load(
            name,
            GroupLoad(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_pending_prefill_tokens=load.num_pending_prefill_tokens,
                num_available_blocks=load.num_free_blocks,
                num_steps=num_steps,
            ),
        )
        self._capacity.observe(description, load, now_s=self._now_s)
        return (time.thread_time_ns() - began_ns) / 1e3


def _quantiles(name: str, times_us: Iterable[float]) -> Times:
    times = sorted(times_us)
    return {f"{name}_p50": times[len(times) // 2], f"{name}_p99": times[len(times) * 99 // 100]}


def _in_process(num_groups: int, num_offers: int, num_frames: int, checkout: Path | None) -> Times:
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(checkout / part) for part in PARTS)
    command = [sys.executable, __file__, "--measure", "--groups", str(num_groups)]
    done = subprocess.run(
        [*command, "--offers", str(num_offers), "--frames", str(num_frames)],
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    measured: Times = json.loads(done.stdout)
    return measured


def report(rows: Mapping[int, Mapping[str, list[Times]]]) -> str:
    """By number of groups and way."""
    lines = ["µs, p50 / p99.", "", f"| groups | | {' | '.join(CASES)} |", "|---" * 8 + "|"]
    for num_groups, ways in rows.items():
        for way, rounds in ways.items():
            times = {name: median(each[name] for each in rounds) for name in rounds[0]}
            cells = [f"{times[f'{n}_p50']:,.1f} / {times[f'{n}_p99']:,.1f}" for n in CASES]
            lines.append(f"| {num_groups:,} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
