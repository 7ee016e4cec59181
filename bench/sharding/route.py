"""What one decision of the routing table costs, by the number of groups.

Prompts of 250 blocks (4,000 tokens), which up to four groups hold; between two decisions three
groups' frames come. Times are this thread's CPU time.
"""

import random
import time
from collections.abc import Iterator, Sequence

from quire.router.directory import GroupId
from quire.router.table import GroupLoad, RoutingTable
from quire.worker.events import BlocksStored, EventBatch
from quire.worker.hashing import HASH_BYTES, BlockHashes

BLOCK_SIZE = 16
NUM_BLOCKS = 250
NUM_PROMPTS = 200
NUM_DECISIONS = 400
MAX_IN_FLIGHT = 100
NUM_FRAMES = 3


def measure(group_counts: Sequence[int]) -> Iterator[dict[str, float]]:
    for num_groups in group_counts:
        yield {"num_groups": num_groups, **_decide(num_groups)}


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


def _load(draw: random.Random) -> GroupLoad:
    return GroupLoad(
        num_running=draw.randrange(30),
        num_waiting=draw.randrange(3),
        num_pending_prefill_tokens=draw.randrange(8000),
        num_available_blocks=draw.randrange(1000),
        num_steps=draw.randrange(1000),
    )
