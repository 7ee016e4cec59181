"""What one decision of the routing table costs, by the number of groups.

Prompts of 250 blocks (4,000 tokens), which up to four groups hold; between two decisions three
groups' frames come. Beside it, what our policy's costs and their minimum take from `GroupState`
objects, as now, and from columns of numbers, which a table would keep up to date as groups change:
the same costs. Times are this thread's CPU time.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.router.directory import GroupId
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.policy import GroupState, RouteRequest
from quire.router.table import GroupLoad, RoutingTable
from quire.worker.events import BlocksStored, EventBatch
from quire.worker.hashing import HASH_BYTES, BlockHashes

BLOCK_SIZE = 16
NUM_BLOCKS = 250
NUM_PROMPTS = 200
NUM_DECISIONS = 400
MAX_IN_FLIGHT = 100
NUM_FRAMES = 3

Column = NDArray[np.float64]


def measure(group_counts: Sequence[int]) -> Iterator[dict[str, float]]:
    for num_groups in group_counts:
        yield {"num_groups": num_groups, **_decide(num_groups), **_scan(num_groups)}


def _decide(num_groups: int) -> dict[str, float]:
    draw = random.Random(0)
    table = RoutingTable(block_size=BLOCK_SIZE)
    groups = [GroupId(f"group-{number:05}") for number in range(num_groups)]
    table.update_members(groups)
    for group in groups:
        table.update_load(group, _load(draw))
    prompts = [BlockHashes(draw.randbytes(HASH_BYTES * NUM_BLOCKS)) for _ in range(NUM_PROMPTS)]
    for number, prompt in enumerate(prompts):
        for holder in draw.sample(groups, min(number % 5, num_groups)):
            seq = table.events_position(holder).next_seq
            batch = EventBatch(epoch=1, first_seq=seq, events=(BlocksStored(prompt),))
            table.apply_events(holder, batch)
    times = []
    for number in range(NUM_DECISIONS):
        for _ in range(NUM_FRAMES):
            table.update_load(draw.choice(groups), _load(draw))
        began_ns = time.thread_time_ns()
        table.route(
            str(number),
            hashes=prompts[number % NUM_PROMPTS],
            num_prompt_tokens=BLOCK_SIZE * NUM_BLOCKS + 10,
        )
        times.append((time.thread_time_ns() - began_ns) / 1e3)
        if number >= MAX_IN_FLIGHT:
            table.completed(str(number - MAX_IN_FLIGHT))
    times.sort()
    return {"p50_us": times[len(times) // 2], "p99_us": times[len(times) * 99 // 100]}


def _scan(num_groups: int) -> dict[str, float]:
    draw = random.Random(0)
    states = [
        GroupState(
            group=GroupId(f"group-{number:05}"),
            num_running=draw.randrange(30),
            num_waiting=draw.randrange(3),
            num_pending_prefill_tokens=draw.randrange(8000),
            num_reserved_requests=draw.randrange(3),
            num_reserved_tokens=draw.randrange(4000),
            step_began_s=draw.uniform(0.9, 1.0),
            step_s=draw.choice([0.0, 0.05, 0.2]),
            num_step_tokens=draw.randrange(8000),
        )
        for number in range(num_groups)
    ]
    columns = Columns(states)
    by_objects, by_columns = PrefixAware(), PrefixAware()
    times: dict[str, list[float]] = {"objects": [], "columns": []}
    for number in range(50):
        request = RouteRequest(
            hashes=(), num_prompt_tokens=4010, block_size=BLOCK_SIZE, now_s=1 + number / 1000
        )
        held = dict.fromkeys(draw.sample(range(num_groups), min(4, num_groups)), 2000)
        hits = [held.get(index, 0) for index in range(num_groups)]
        began_ns = time.thread_time_ns()
        costs = by_objects.costs(request, states, hits)
        least = min(costs)
        times["objects"].append((time.thread_time_ns() - began_ns) / 1e3)
        began_ns = time.thread_time_ns()
        same = columns.costs(by_columns, request, held)
        same_least = float(same.min())
        times["columns"].append((time.thread_time_ns() - began_ns) / 1e3)
        assert np.allclose(costs, same)
        assert abs(least - same_least) < 1e-6
    return {f"{name}_p50_us": sorted(took)[len(took) // 2] for name, took in times.items()}


class Columns:
    """The groups' loads as arrays."""

    def __init__(self, states: Sequence[GroupState]) -> None:
        def column(read: Callable[[GroupState], float]) -> Column:
            return np.array([read(state) for state in states], dtype=np.float64)

        self._queued = column(lambda state: state.num_queued_tokens)
        self._in_step = column(lambda state: state.num_running + state.num_waiting)
        self._requests = column(lambda state: state.num_requests)
        self._began_s = column(lambda state: state.step_began_s)
        self._step_s = column(lambda state: state.step_s)
        self._step_tokens = column(lambda state: state.num_step_tokens)

    def costs(self, policy: PrefixAware, request: RouteRequest, hits: dict[int, int]) -> Column:
        """What ``policy`` gives each group, of which those that hold something are in ``hits``."""
        config = policy._config
        rest = config.request_tokens * self._in_step
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (request.now_s - self._began_s) / self._step_s
        over = np.where((share > 0) & (share < 2) & (self._step_s > 0), np.minimum(share, 1), 0)
        rest -= over * (rest + self._step_tokens)
        missing = np.full(len(rest), float(request.num_prompt_tokens))
        for index, num_hits in hits.items():
            missing[index] -= num_hits
        pending = self._queued + missing / 2
        behind = np.minimum(pending / config.tokens_per_arrival, config.max_behind)
        beside = config.request_tokens * self._requests
        costs: Column = self._queued + rest + (config.missing + behind) * missing + beside
        return costs


def _load(draw: random.Random) -> GroupLoad:
    return GroupLoad(
        num_running=draw.randrange(30),
        num_waiting=draw.randrange(3),
        num_pending_prefill_tokens=draw.randrange(8000),
        num_available_blocks=draw.randrange(1000),
        num_steps=draw.randrange(1000),
    )
