"""Replays prompts through a real block pool, without a model, and counts cache hits.

It acts like an engine that serves one request at a time and samples one token: it takes the cached
blocks of all but the last token, allocates the rest, registers the full blocks and releases all.
Traces are files; workloads are generated here from a seed.
"""

import heapq
import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from math import log
from pathlib import Path
from typing import NamedTuple

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockPool
from quire.worker.cache.eviction import PolicyFactory

TRACE_BLOCK_SIZE = 512
"""Tokens in a block of the Mooncake traces, and of the workloads here."""


class Prompt(NamedTuple):
    hashes: list[BlockHash]
    """The hashes of its full blocks."""
    num_tokens: int


class Savings(NamedTuple):
    """Savings by the cache, as parts of the requested work."""

    num_tokens: int
    num_hit_tokens: int
    cost: float
    """To prefill all prompts, in milliseconds of `prefill_ms`."""
    saved: float

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_tokens

    @property
    def saved_rate(self) -> float:
        return self.saved / self.cost


def prefill_ms(num_tokens: int) -> float:
    """Time to prefill the first ``num_tokens`` tokens: an 8B model, as in Dynamo's mocker."""
    return 0.015175 * num_tokens + 4.23e-7 * num_tokens**2


def replay(
    prompts: list[Prompt],
    *,
    num_blocks: int,
    policy: PolicyFactory,
    block_size: int = TRACE_BLOCK_SIZE,
    on_request: Callable[[int], None] = lambda index: None,
) -> Savings:
    """``on_request`` hears the index of each prompt before it is served.

    Raises:
        NoFreeBlocks: A prompt does not fit into the pool.
    """
    pool = BlockPool(
        num_blocks=num_blocks, block_size=block_size, log=EventLog(epoch=0), policy=policy
    )
    num_tokens = num_hit_tokens = 0
    cost = saved = 0.0
    for index, prompt in enumerate(prompts):
        on_request(index)
        hashes = prompt.hashes
        hits = pool.match(hashes[: (prompt.num_tokens - 1) // block_size])
        pool.acquire(hits)
        own = pool.allocate(-(-prompt.num_tokens // block_size) - len(hits))
        named = pool.register(
            own[: len(hashes) - len(hits)],
            hashes[len(hits) :],
            parent=hits[-1] if hits else None,
        )
        pool.release([block for block, other in zip(own, named, strict=False) if block != other])
        pool.release(hits + named + own[len(named) :])
        num_tokens += prompt.num_tokens
        num_hit_tokens += len(hits) * block_size
        cost += prefill_ms(prompt.num_tokens)
        saved += prefill_ms(len(hits) * block_size)
    return Savings(num_tokens, num_hit_tokens, cost, saved)


def load_trace(path: Path) -> list[Prompt]:
    """Prompts of a trace in Mooncake's format, in order of arrival."""
    prompts = []
    with path.open() as lines:
        for line in lines:
            request = json.loads(line)
            num_tokens = request["input_length"]
            block_ids = request["hash_ids"][: num_tokens // TRACE_BLOCK_SIZE]
            prompts.append(Prompt([_hash(block_id) for block_id in block_ids], num_tokens))
    return prompts


def agents(*, seed: int = 0, num_turns: int = 6000) -> list[Prompt]:
    """Contexts that grow turn by turn; at any time 60 agents work, some faster than others."""
    rng, ids = random.Random(seed), count()
    system = _new(ids, 4)
    contexts: list[list[BlockHash]] = [list(system) for _ in range(60)]
    prompts = []
    for _ in range(num_turns):
        agent = min(rng.randrange(60), rng.randrange(60))
        contexts[agent] = contexts[agent] + _new(ids, rng.randint(1, 3))
        prompts.append(_prompt(contexts[agent]))
        if rng.random() < 0.03:
            contexts[agent] = list(system)
    return prompts


def sessions(*, seed: int = 0, num_sessions: int = 150, num_at_once: int = 48) -> list[Prompt]:
    """Agents' sessions of 43 turns. Behind each turn a tool runs, for 8 s in the median and for
    minutes now and then; its output is 1 to 4 blocks more of context."""
    rng, ids = random.Random(seed), count()
    system = _new(ids, 4)
    order = count()
    turns: list[tuple[float, int, list[BlockHash], int]] = []
    num_begun = 0
    prompts = []
    now_s = 0.0
    while turns or num_begun < num_sessions:
        while len(turns) < num_at_once and num_begun < num_sessions:
            num_begun += 1
            begin_s = now_s + rng.uniform(0, 60)
            heapq.heappush(turns, (begin_s, next(order), list(system), 43))
        now_s, _, context, num_left = heapq.heappop(turns)
        context = context + _new(ids, rng.randint(1, 4))
        prompts.append(_prompt(context))
        if num_left > 1:
            next_s = now_s + rng.lognormvariate(log(8), 1.2)
            heapq.heappush(turns, (next_s, next(order), context, num_left - 1))
    return prompts


def scans(*, seed: int = 0, num_requests: int = 8000) -> list[Prompt]:
    """Popular documents, and every eighth request reads something long that never returns."""
    rng, ids = random.Random(seed), count()
    documents = [_new(ids, rng.randint(5, 25)) for _ in range(100)]
    return [
        _prompt(_new(ids, 100) if rng.random() < 1 / 8 else _popular(rng, documents) + _new(ids, 1))
        for _ in range(num_requests)
    ]


def long_tails(*, seed: int = 0, num_requests: int = 6000) -> list[Prompt]:
    """Hot system prompts, each request with a long part of its own behind it."""
    rng, ids = random.Random(seed), count()
    systems = [_new(ids, 8) for _ in range(80)]
    return [
        _prompt(_popular(rng, systems) + _new(ids, rng.randint(8, 24))) for _ in range(num_requests)
    ]


def periodic(*, seed: int = 0, num_requests: int = 8000) -> list[Prompt]:
    """60 jobs that run in turn, half of the requests between them being one-off."""
    rng, ids = random.Random(seed), count()
    jobs = [_new(ids, 10) for _ in range(60)]
    return [
        _prompt(_new(ids, rng.randint(2, 10)) if number % 2 else jobs[number // 2 % 60])
        for number in range(num_requests)
    ]


def _popular(rng: random.Random, items: list[list[BlockHash]]) -> list[BlockHash]:
    """One of ``items``, the i-th with a probability that falls as 1/i."""
    return items[int(len(items) ** rng.random()) - 1]


def _prompt(hashes: list[BlockHash]) -> Prompt:
    return Prompt(hashes, len(hashes) * TRACE_BLOCK_SIZE + 1)


def _new(ids: Iterator[int], num_blocks: int) -> list[BlockHash]:
    return [_hash(next(ids)) for _ in range(num_blocks)]


def _hash(block_id: int) -> BlockHash:
    return BlockHash(block_id.to_bytes(8, "little"))
